"""data/crops.py: the crops of the whole upright image, from less decoding; through both back ends."""

import io
import os
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data import crops, jpeg
from data.crops import crop_backend, load_opencv, random_crops
from data.decode import MAX_PIXELS, decode_image
from data.errors import BadImage
from data.jpeg import load_simplejpeg
from data.transforms import draw_crop, random_resized_crop_flip

SCALE, FLIP = (0.2, 1.0), 0.5
SHARED = Path(__file__).parents[3] / "shared" / "data"


def forget_modules() -> None:
    load_opencv.cache_clear()
    load_simplejpeg.cache_clear()


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cv2", None)
        patch.setitem(sys.modules, "simplejpeg", None)
        forget_modules()
        yield
    forget_modules()


@pytest.fixture(params=["simplejpeg + opencv", "Pillow"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "Pillow":
        request.getfixturevalue("without_extra")
    elif crop_backend() == "Pillow":
        pytest.skip("the extra `fast` is not installed")
    assert crop_backend() == request.param
    return request.param


def photo(height: int, width: int, seed: int = 0, num_channels: int = 3) -> np.ndarray:
    """(height, width, 3) or (height, width): noise with the spectrum of photographs, and a few sharp-edged things in it."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    spectrum = 1 / np.maximum(frequency, 1 / max(height, width)) ** 1.3
    channels = []
    for _ in range(num_channels):
        noise = np.fft.irfft2(spectrum * np.fft.rfft2(random.normal(size=(height, width))), s=(height, width))
        channels.append(128 + 45 * noise / max(noise.std(), 1e-9))
    pixels = np.stack(channels, axis=2)
    for _ in range(8):
        top, left = random.integers(height), random.integers(width)
        pixels[top : top + height // 6, left : left + width // 8] = random.integers(256, size=num_channels)
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return pixels if num_channels == 3 else pixels[:, :, 0]


def encode(pixels: np.ndarray, image_format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format, **({"quality": 92} if image_format == "JPEG" else {}) | options)
    return buffer.getvalue()


def turned(pixels: np.ndarray, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(pixels, exif=exif, **options)


def crop(data: bytes, seeds: list[int], size: tuple[int, int] = (64, 64), num_channels: int = 3) -> list[Tensor]:
    return random_crops(data, num_channels, seeds, size, SCALE, FLIP, max_pixels=MAX_PIXELS)


def crop_whole(data: bytes, seeds: list[int], size: tuple[int, int] = (64, 64), num_channels: int = 3) -> list[Tensor]:
    """What `random_crops` shall equal: the whole image, decoded and resized in the plainest way."""
    image = decode_image(data, num_channels)
    return [random_resized_crop_flip(image, seed, size, SCALE, FLIP) for seed in seeds]


def psnr(first: Tensor, second: Tensor) -> float:
    error = (first.double() - second.double()).square().mean().clamp(min=1e-9)
    return float(10 * torch.log10(255**2 / error))


def worst_psnr(first: list[Tensor], second: list[Tensor]) -> float:
    assert [crop.shape for crop in first] == [crop.shape for crop in second]
    return min(psnr(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the decoder reduced each image."""
    seen: list[int] = []

    def spy(header: Any, views: Any) -> int:
        factor = real(header, views)
        seen.append(factor)
        for view in views:  # no crop is enlarged because the decoder reduced too far, nor decoded larger than needed
            assert factor == 1 or (view.box.height >= factor * view.size[0] and view.box.width >= factor * view.size[1])
        is_narrow = min(header.height, header.width) < 64
        assert (
            factor == 8 or is_narrow or any(min(v.box.height / v.size[0], v.box.width / v.size[1]) < 2 * factor for v in views)
        )
        return factor

    real = crops._reduction
    monkeypatch.setattr(crops, "_reduction", spy)
    return seen


# --------------------------------------------------------------------------------------------------------------------
# The same crops


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("size", "factor"), [((200, 150), 1), ((64, 48), 2), ((30, 24), 4), ((12, 16), 8)])
def test_boxes_and_flips_are_those_of_the_whole_image(
    orientation: int, size: tuple[int, int], factor: int, backend: str, factors: list[int]
) -> None:
    """Colours are the stored coordinates, so that a shifted box, or a picture turned wrongly, changes the mean colour."""
    rows, columns = np.mgrid[0:407, 0:305]
    pixels = np.stack([rows * 255 / 407, columns * 255 / 305, 40 + 0 * rows], axis=2).astype(np.uint8)
    data = turned(pixels, orientation, subsampling=0, quality=98)
    upright = (305, 407) if orientation > 4 else (407, 305)
    for seed in range(12):
        [mine], [expected] = crop(data, [seed], size), crop_whole(data, [seed], size)
        assert mine.shape == (3, *size)
        difference = mine.double() - expected.double()
        box, _ = draw_crop(seed, *upright, SCALE, FLIP)
        levels_per_pixel = max(255 / upright[0] * box.height / size[0], 255 / upright[1] * box.width / size[1])
        # Halves: shifts of opposite sides do not cancel. Rounding is the rest.
        for part in (difference[:, : size[0] // 2], difference[:, size[0] // 2 :], *difference.chunk(2, dim=2)):
            assert part.mean((1, 2)).abs().max() < 0.06 * levels_per_pixel + 0.25
    assert factor in factors


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_look_the_same(orientation: int, backend: str, factors: list[int]) -> None:
    """Measured on these: at least 37.8 dB, through both back ends."""
    data = turned(photo(500, 380, orientation), orientation)
    for size in ((224, 224), (100, 140), (40, 40)):
        seeds = list(range(8))
        alone = [crop(data, [seed], size)[0] for seed in seeds]
        expected = crop_whole(data, seeds, size)
        assert worst_psnr(alone, expected) > 36
        assert worst_psnr(crop(data, seeds, size), expected) > 36
    assert {1, 2} < set(factors)


def test_real_photos_look_the_same(backend: str) -> None:
    """Measured on all 400: mean 46.0, worst 36.4 dB at 224 px; 42.5 and 29.0 dB at 96 x 128 px (water, reduced by 2)."""
    archive = SHARED / "imagenet-sample-400.tar"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    ratios: dict[tuple[int, int], list[float]] = {(224, 224): [], (96, 128): []}
    with tarfile.open(archive) as files:
        members = [member for member in files if member.isfile()][::20]
        for number, member in enumerate(members):
            data = files.extractfile(member).read()  # pyright: ignore[reportOptionalMemberAccess] - it is a file
            for size, values in ratios.items():
                values.append(worst_psnr(crop(data, [number], size), crop_whole(data, [number], size)))
    assert np.mean(ratios[224, 224]) > 43
    assert min(ratios[224, 224]) > 35
    assert np.mean(ratios[96, 128]) > 40
    assert min(ratios[96, 128]) > 28


@pytest.mark.parametrize("reduction", [0.6, 1.0, 1.15, 1.4, 1.7, 1.99, 2.3, 2.69])
def test_resizing_by_opencv_is_antialiased(reduction: float) -> None:
    """Stripes of the highest frequency: plain bicubic resizing makes new, wrong stripes of them."""
    cv2 = load_opencv()
    if cv2 is None:
        pytest.skip("the extra `fast` is not installed")
    new = round(240 / reduction)
    striped = np.repeat(np.where(np.arange(240) % 2, 200, 50).astype(np.uint8), 240 * 3).reshape(240, 240, 3)
    for picture, least in ((photo(240, 240), 41), (striped, 24), (striped.swapaxes(0, 1), 24)):
        picture = np.ascontiguousarray(picture)
        mine = torch.from_numpy(crops._resize_by_opencv(picture, (new, new), cv2).copy()).permute(2, 0, 1)
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(picture).permute(2, 0, 1)[None], size=(new, new), mode="bicubic", antialias=True
        )[0]
        assert psnr(mine, expected) > least  # without the blur: 30 and 14 dB at the larger reductions


@pytest.mark.parametrize(
    "options", [{"subsampling": n} for n in (0, 1, 2)] + [{"progressive": True}, {"restart_marker_rows": 1}]
)
@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("stored_channels", [1, 3])
def test_kinds_of_jpeg(options: dict[str, Any], num_channels: int, stored_channels: int, backend: str) -> None:
    data = encode(photo(333, 251, num_channels=stored_channels), **options)
    seeds = list(range(6))
    for size in ((120, 120), (48, 48)):
        mine = crop(data, seeds, size, num_channels)
        assert worst_psnr(mine, crop_whole(data, seeds, size, num_channels)) > 33
        assert mine[0].shape == (num_channels, *size)
        if stored_channels == 1 and num_channels == 3:
            assert torch.equal(mine[0][0], mine[0][2])


COMMON: list[dict[str, Any]] = [
    {}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}, {"restart_marker_rows": 2}, {"optimize": True},
    {"comment": "seen"}, {"icc_profile": b"profile"}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, {"keep_rgb": True},
]  # fmt: skip


@pytest.mark.parametrize("options", COMMON)
@pytest.mark.parametrize("stored_channels", [1, 3])
def test_common_files_go_the_fast_way(
    options: dict[str, Any], stored_channels: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("decoded whole")

    data = encode(photo(333, 251, num_channels=stored_channels), **options)
    monkeypatch.setattr(crops, "decode_image", refuse)
    sizes = [(224, 224), (40, 40)] if backend != "Pillow" else [(40, 40)]  # which gains by reducing alone
    for size in sizes:
        assert crop(data, [1, 2], size)[0].shape == (3, *size)


def test_jpeg_of_rgb_is_not_taken_for_another_colour_space(backend: str) -> None:
    data = encode(photo(120, 90), keep_rgb=True)
    assert worst_psnr(crop(data, [1, 2, 3]), crop_whole(data, [1, 2, 3])) > 33


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 9), (16, 2000), (2000, 16), (65, 64)])
def test_tiny_and_long_pictures(shape: tuple[int, int], backend: str) -> None:
    data = encode(photo(*shape))
    for size in ((1, 1), (8, 8), (50, 30)):
        for seed in range(6):
            assert worst_psnr(crop(data, [seed], size), crop_whole(data, [seed], size)) > 26


def test_strong_reduction_one_way_is_antialiased(backend: str, factors: list[int]) -> None:
    data = encode(photo(150, 150), subsampling=0)
    assert worst_psnr(crop(data, [1, 2, 3], (120, 10)), crop_whole(data, [1, 2, 3], (120, 10))) > 45
    assert set(factors) == {1}


def test_narrow_pictures_are_not_reduced(backend: str, factors: list[int]) -> None:
    data = encode(photo(63, 200))
    assert worst_psnr(crop(data, [1], (5, 5)), crop_whole(data, [1], (5, 5))) > 26
    assert factors == [1]


def test_warnings_of_metadata_do_not_reach_the_log(backend: str) -> None:
    data = encode(photo(100, 100), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert crop(data, [1], (20, 20))[0].shape == (3, 20, 20)
    assert caught == []


def odd_files() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    rgba = np.dstack([photo(40, 60), random.integers(0, 256, (40, 60), dtype=np.uint8)])
    cmyk = io.BytesIO()
    Image.fromarray(photo(40, 60)).convert("CMYK").save(cmyk, "JPEG")
    palette, animation = io.BytesIO(), io.BytesIO()
    Image.fromarray(photo(40, 60)).quantize(32).save(palette, "PNG", transparency=3)
    frames = [Image.fromarray(photo(40, 60, seed)) for seed in range(2)]
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    # The transform that the Adobe segment names: 0 is CMYK, 2 is YCCK.
    position = cmyk.getvalue().index(b"Adobe") + 11
    ycck = cmyk.getvalue()[:position] + b"\2" + cmyk.getvalue()[position + 1 :]
    return {
        "rgba": encode(rgba, "PNG"),
        "palette": palette.getvalue(),
        "16 bits": encode(random.integers(0, 65536, (40, 60)).astype(np.uint16), "PNG"),
        "cmyk": cmyk.getvalue(),
        "ycck": ycck,
        "webp": encode(photo(40, 60), "WEBP"),
        "animation": animation.getvalue(),
        "tiff": encode(photo(40, 60), "TIFF"),
    }


@pytest.mark.parametrize("kind", odd_files())
def test_everything_else_is_cropped_from_the_whole_image(kind: str, backend: str) -> None:
    data = odd_files()[kind]
    for num_channels in (1, 3):
        mine, expected = crop(data, [3, 4], num_channels=num_channels), crop_whole(data, [3, 4], num_channels=num_channels)
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_arrays_of_any_channels(backend: str) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(0).integers(0, 256, (30, 40, 5), dtype=np.uint8))
    [mine], [expected] = crop(buffer.getvalue(), [1], num_channels=5), crop_whole(buffer.getvalue(), [1], num_channels=5)
    assert torch.equal(mine, expected)


def test_crops_are_contiguous_and_keep_their_memory(backend: str) -> None:
    first = crop(encode(photo(200, 200)), [1, 2])
    before = [view.clone() for view in first]
    crop(encode(255 - photo(200, 200)), [1, 2])
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    assert all(view.is_contiguous() and view.dtype == torch.uint8 for view in first)
    assert not torch.equal(first[0], first[1])
    assert crop(encode(photo(20, 20)), []) == []


# --------------------------------------------------------------------------------------------------------------------
# Rows left out


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7, 0.9, 0.97])
def test_cut_off_files_are_refused_wherever_the_crop_is(kept: float, backend: str) -> None:
    kinds: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"subsampling": 0}]
    for options in kinds:
        data = encode(photo(300, 200), **options)
        bottoms = [box.top + box.height for box, _ in (draw_crop(seed, 300, 200, SCALE, FLIP) for seed in range(10))]
        assert min(bottoms) < 200, "some crops must end above the cut, or nothing is tested"
        for seed in range(10):
            with pytest.raises(BadImage) as caught:
                crop(data[: int(len(data) * kept)], [seed], (32, 32))
            assert caught.value.cause == "truncated"


def outcome(make: Any) -> Tensor | str:
    try:
        return make()[0]
    except BadImage as error:
        return error.cause


def test_damaged_files_give_what_pillow_makes_of_them(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, codes, or end; refused with Pillow's cause, or the picture that Pillow sees."""
    random = np.random.default_rng(0)
    pictures = [encode(photo(96, 80)), turned(photo(96, 80), 6), encode(photo(96, 80), progressive=True)]
    outcomes = []
    for number in range(240):
        damaged = bytearray(pictures[number % 3])
        if number % 4 == 0:
            del damaged[random.integers(len(damaged)) :]
        for position in random.integers(0, len(damaged), size=2):
            damaged[position] = random.integers(256)
        data = bytes(damaged)
        mine = outcome(lambda data=data, seed=number: crop(data, [seed], (24, 24)))
        with monkeypatch.context() as patch:
            patch.setattr("data.decode._decode_common_jpeg", lambda *_: None)
            expected = outcome(lambda data=data, seed=number: crop_whole(data, [seed], (24, 24)))
        if isinstance(expected, str) or isinstance(mine, str):
            assert mine == expected
        elif backend != "Pillow":  # which does not say that it saw damage, and shows it otherwise where it reduces
            assert psnr(mine, expected) > 24
        outcomes.append(expected if isinstance(expected, str) else "picture")
    assert {"picture", "truncated", "corrupt"} <= set(outcomes)


def test_pixel_limit_is_checked_before_decoding(backend: str) -> None:
    data = encode(photo(100, 200))
    assert random_crops(data, 3, [0], (8, 8), SCALE, FLIP, max_pixels=20000)[0].shape == (3, 8, 8)
    for whole_or_cut in (data, data[: len(data) // 2]):
        with pytest.raises(BadImage, match="100 x 200") as caught:
            random_crops(whole_or_cut, 3, [0], (8, 8), SCALE, FLIP, max_pixels=19999)
        assert caught.value.cause == "too_many_pixels"


def test_pillows_own_limit_holds(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photo(10, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90)
    with pytest.raises(BadImage) as caught:
        crop(data, [0])
    assert caught.value.cause == "too_many_pixels"


@pytest.mark.parametrize("num_channels", [2, 5])
def test_channels_that_an_image_does_not_have(num_channels: int, backend: str) -> None:
    with pytest.raises(BadImage) as caught:
        crop(encode(photo(10, 20)), [0], num_channels=num_channels)
    assert caught.value.cause == "channels"


def test_odd_files_of_pillows_tests(backend: str) -> None:
    archive = SHARED / "odd-images.tar"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    with tarfile.open(archive) as files:
        for member in files:
            if not member.isfile():
                continue
            data = files.extractfile(member).read()  # pyright: ignore[reportOptionalMemberAccess] - it is a file
            for num_channels in (1, 3):
                mine = outcome(lambda data=data, n=num_channels: crop(data, [5], (40, 40), n))
                expected = outcome(lambda data=data, n=num_channels: crop_whole(data, [5], (40, 40), n))
                if isinstance(mine, str) or isinstance(expected, str):
                    assert mine == expected, member.name
                elif (backend, Path(member.name).name) != ("Pillow", "hopper_bad_exif.jpg"):  # its codes are damaged, too
                    assert psnr(mine, expected) > 28, member.name


# --------------------------------------------------------------------------------------------------------------------
# Back ends


def test_either_module_alone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for missing in ("cv2", "simplejpeg"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            forget_modules()
            assert crop_backend() == "Pillow"
            results.append(crop(encode(photo(300, 300)), [1])[0])
    forget_modules()
    assert torch.equal(*results)


def test_opencv_is_held_to_one_thread_and_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    for value in (None, "3"):
        monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        if value is not None:
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
        forget_modules()
        cv2 = load_opencv()
        assert cv2 is not None
        assert cv2.getNumThreads() == 1
        assert os.environ.get("OPENBLAS_NUM_THREADS") == value


def test_large_pictures_leave_no_memory_behind(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_MAX_SCRATCH_BYTES", 1000)
    monkeypatch.setattr(jpeg.scratch, "blocks", {})
    data = encode(photo(90, 90))
    assert worst_psnr(crop(data, [1]), crop_whole(data, [1])) > 33
    assert sum(block.nbytes for block in jpeg.scratch.blocks.values()) <= 1000
