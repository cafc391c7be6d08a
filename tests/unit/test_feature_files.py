import json
import tarfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from webdataset.autodecode import Decoder, basichandlers
from webdataset.tariterators import group_by_keys, tar_file_iterator

from data.errors import DataError
from data.evaluation import evaluation_batches
from data.reader import ShardReader
from data.shards import ShardSet, open_shards
from data.transforms import Normalization
from data.writer import list_images, write_shards
from models.formats import PretrainedEncoder, load_encoder
from models.mae import MAEConfig, build_mae
from pretrain.report import export_encoder
from tests.conftest import write_pictures
from training.cli import UserError
from training.feature_files import ArrayFile, EncodedSamples, FeatureFilesConfig, TarShard, new_folder, write_features
from training.features import encode_images

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture
def encoder(tiny_config: MAEConfig, tmp_path: Path) -> PretrainedEncoder:
    torch.manual_seed(0)
    (tmp_path / "encoder").mkdir()
    export_encoder(tmp_path / "encoder", build_mae(tiny_config), tiny_config, Normalization(MEAN, STD))
    return load_encoder(str(tmp_path / "encoder"))


def wide_encoder(**arguments: Any) -> PretrainedEncoder:
    """Images of 16 x 48 px: 2 rows and 6 columns of patches."""
    torch.manual_seed(0)
    arguments = {
        "img_size": [16, 48],
        "patch_size": 8,
        "embed_dim": 24,
        "num_heads": 2,
        "in_chans": 3,
        "num_classes": 0,
    } | arguments
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    assert isinstance(model, VisionTransformer)
    return PretrainedEncoder(model.eval(), (16, 48), 3, MEAN, STD, "vit_tiny_patch16_224", arguments)


def random_images(count: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_tokens_are_those_of_timm_in_image_order(encoder: PretrainedEncoder) -> None:
    images = random_images(3, 32, 32)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        tokens = encoder.model.forward_features((images / 255 - mean) / std)  # (3, 1 + 16, 32)
    cls, patches = encode_images(encoder, images)
    assert cls is not None
    torch.testing.assert_close(cls, tokens[:, 0])
    torch.testing.assert_close(patches, tokens[:, 1:].reshape(3, 4, 4, 32))
    cls.sum().requires_grad_()  # no inference tensors: a head can be trained on them
    assert not cls.is_inference()


def test_place_in_the_map_is_the_place_in_the_image() -> None:
    """Without attention every token sees its own patch only."""
    encoder = wide_encoder(depth=2)
    for block in encoder.model.blocks:
        projection = cast(nn.Linear, block.get_submodule("attn.proj"))
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
    images = random_images(1, 16, 48).expand(2, -1, -1, -1).clone()
    row, column = 1, 4
    images[1, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] ^= 128
    patches = encode_images(encoder, images).patches
    assert patches.shape == (2, 2, 6, 24)
    changed = (patches[0] != patches[1]).any(dim=-1)
    assert changed.nonzero().tolist() == [[row, column]]


def test_block_is_chosen_and_normed(encoder: PretrainedEncoder) -> None:
    images = random_images(2, 32, 32)
    last, first = encode_images(encoder, images), encode_images(encoder, images, block=1)
    for given, same in zip(encode_images(encoder, images, block=2), last, strict=True):
        assert given is not None
        assert same is not None
        assert torch.equal(given, same)
    encoder.model.blocks[1] = nn.Identity()
    without_second = encode_images(encoder, images)
    torch.testing.assert_close(first.patches, without_second.patches)
    assert not torch.allclose(first.patches, last.patches)


@pytest.mark.parametrize(
    ("arguments", "has_cls"),
    [
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, False),
        ({"reg_tokens": 3}, True),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg", "fc_norm": False}, False),
    ],
)
def test_tokens_that_are_no_patches_stay_out_of_the_map(arguments: dict[str, Any], has_cls: bool) -> None:
    encoder = wide_encoder(depth=1, **arguments)
    images = random_images(2, 16, 48)  # two: a list of two must not be taken for a pair
    with torch.no_grad():
        tokens = encoder.model.forward_features(Normalization(MEAN, STD).apply(images))
    cls, patches = encode_images(encoder, images)
    torch.testing.assert_close(patches, tokens[:, -12:].reshape(2, 2, 6, 24))
    assert (cls is not None) == has_cls
    if cls is not None:
        torch.testing.assert_close(cls, tokens[:, 0])


def test_bfloat16_is_close_and_comes_out_as_float32(encoder: PretrainedEncoder) -> None:
    images = random_images(2, 32, 32)
    exact, rough = encode_images(encoder, images), encode_images(encoder, images, dtype=torch.bfloat16)
    assert rough.patches.dtype == torch.float32
    assert not torch.equal(rough.patches, exact.patches)
    torch.testing.assert_close(rough.patches, exact.patches, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("images", "block", "message"),
    [
        (torch.zeros(1, 3, 32, 32), None, r"takes uint8 images .* \(any, 3, 32, 32\), not float32 of \(1, 3, 32, 32\)"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), None, r"not uint8 of \(3, 32, 32\)"),
        (torch.zeros(1, 3, 32, 40, dtype=torch.uint8), None, r"not uint8 of \(1, 3, 32, 40\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), 3, r"block 3: the encoder has the blocks 1 \.\. 2"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), 0, r"block 0: the encoder has the blocks 1 \.\. 2"),
    ],
)
def test_what_the_encoder_cannot_take_is_refused(
    encoder: PretrainedEncoder, images: Tensor, block: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_images(encoder, images, block)


# --------------------------------------------------------------------------------------------------------------------
# Files


def read_back(folder: Path, index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One sample after the other, whatever the format: index, shard, key, label, cls, patches."""
    for file in index["files"]:
        path, count = folder / file["name"], 0
        for sample in {"safetensors": _safetensors, "npz": _npz, "shards": _shards}[index["layout"]](path):
            assert sample["index"] == file["first_sample"] + count
            count += 1
            yield sample
        assert count == file["num_samples"]


def _safetensors(path: Path) -> Iterator[dict[str, Any]]:
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        sources = json.loads(file.metadata()["sources"])
    yield from _rows(arrays, sources)


def _npz(path: Path) -> Iterator[dict[str, Any]]:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    yield from _rows(arrays, list(zip(arrays["shards"].tolist(), arrays["keys"].tolist(), strict=True)))


def _rows(arrays: dict[str, np.ndarray], sources: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for row, (shard, key) in enumerate(sources):
        tokens = {name: arrays[name][row] for name in ("cls", "patches") if name in arrays}
        yield {"index": arrays["indices"][row], "shard": shard, "key": key, "label": arrays["labels"][row], **tokens}


def _shards(path: Path) -> Iterator[dict[str, Any]]:
    """By webdataset's own grouping and decoding."""
    decoder = Decoder([basichandlers])
    with path.open("rb") as stream:  # opened here, for webdataset leaves its files to the garbage collector
        for sample in map(
            decoder, group_by_keys({**item, "__url__": str(path)} for item in tar_file_iterator(cast(tarfile.TarFile, stream)))
        ):
            about = sample["json"]
            assert int(sample["__key__"]) == about["index"]
            assert about["label"] == sample.get("cls")
            tokens = {name: sample[f"{name}.npy"] for name in ("cls", "patches") if f"{name}.npy" in sample}
            label = -1 if about["label"] is None else about["label"]
            yield {"index": about["index"], "shard": about["shard"], "key": about["key"], "label": label, **tokens}


@pytest.fixture(scope="module")
def unlabelled_shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    folder = tmp_path_factory.mktemp("unlabelled")
    write_pictures(folder / "source", 7)
    write_shards(list_images(folder / "source", labelled=False), folder / "shards", num_workers=0)
    return open_shards(folder / "shards")


@pytest.mark.parametrize("layout", ["safetensors", "npz", "shards"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_files_hold_every_sample_with_label_and_origin(
    layout: Any,
    dtype: Any,
    encoder: PretrainedEncoder,
    picture_shards: ShardSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """53 samples in batches of 8 and files of 10: neither divides the other."""
    monkeypatch.setattr("training.feature_files.MAX_SAMPLES_PER_FILE", 10)
    config = FeatureFilesConfig("both", None, layout, dtype, "float32", batch_size=8, num_workers=0)
    written = write_features(encoder, picture_shards, tmp_path / "out", config, CPU)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index == written
    assert [file["num_samples"] for file in index["files"]] == [10, 10, 10, 10, 10, 3]
    assert names(tmp_path / "out") == sorted(["index.json", *(file["name"] for file in index["files"])])
    assert (index["num_samples"], index["block"], index["depth"], index["dtype"]) == (53, 2, 2, dtype)
    assert index["tokens"] == {"cls": [32], "patches": [4, 4, 32]}
    assert index["class_names"] == ["even", "odd"]
    samples = list(read_back(tmp_path / "out", index))
    (batch,) = evaluation_batches(picture_shards, (32, 32), 3, 53, 0)
    expected = encode_images(encoder, batch.images)
    assert expected.cls is not None
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    for name, tensor in (("cls", expected.cls), ("patches", expected.patches)):
        found = np.stack([sample[name] for sample in samples])
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(np.float32), tensor.numpy(), atol=tolerance, rtol=tolerance)
    assert [sample["label"] for sample in samples] == picture_shards.labels.tolist()
    with ShardReader(picture_shards) as reader:
        originals = [reader.read(number) for number in range(53)]
    assert [(sample["shard"], sample["key"]) for sample in samples] == [(one.shard, one.key) for one in originals]


@pytest.mark.parametrize("layout", ["safetensors", "npz", "shards"])
def test_images_without_labels_and_one_kind_of_tokens(
    layout: Any, encoder: PretrainedEncoder, unlabelled_shards: ShardSet, tmp_path: Path
) -> None:
    config = FeatureFilesConfig("patches", 1, layout, "float32", "float32", num_workers=1)
    index = write_features(encoder, unlabelled_shards, tmp_path / "out", config, CPU)
    samples = list(read_back(tmp_path / "out", index))
    assert [sample["label"] for sample in samples] == [-1] * 7
    assert all("cls" not in sample for sample in samples)
    (batch,) = evaluation_batches(unlabelled_shards, (32, 32), 3, 7, 0)
    expected = encode_images(encoder, batch.images, block=1).patches
    np.testing.assert_allclose(np.stack([sample["patches"] for sample in samples]), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("layout", ["safetensors", "npz", "shards"])
def test_files_are_as_large_as_asked_and_no_more_is_held(
    layout: Any, encoder: PretrainedEncoder, picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps of 4 x 4 x 32 float32 are 2 KiB; of a MiB the 53 samples would fill a ninth, so a MiB is made smaller here."""
    monkeypatch.setattr("training.feature_files.MIB", 2**15)
    config = FeatureFilesConfig("patches", None, layout, "float32", "float32", file_mib=1, batch_size=4, num_workers=0)
    given: list[weakref.ref[EncodedSamples]] = []
    held: list[int] = []
    for kind in (ArrayFile, TarShard):

        def add(self: Any, samples: EncodedSamples, add: Any = kind.add) -> None:
            given.append(weakref.ref(samples))
            held.append(sum(len(part) for reference in given if (part := reference()) is not None))
            add(self, samples)

        monkeypatch.setattr(kind, "add", add)
    index = write_features(encoder, picture_shards, tmp_path / "out", config, CPU)
    assert len(index["files"]) > 3
    counts = [file["num_samples"] for file in index["files"]]
    assert len(set(counts[:-1])) == 1
    sizes = [(tmp_path / "out" / file["name"]).stat().st_size for file in index["files"][:-1]]
    assert max(held) <= counts[0] + 4  # a file and a batch
    assert all(0.5 * 2**15 < size < 1.6 * 2**15 for size in sizes), sizes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_output_is_complete_or_as_it_was(
    exists: bool, encoder: PretrainedEncoder, picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    if exists:
        out.mkdir(parents=True)
    config = FeatureFilesConfig(batch_size=8, num_workers=0)
    seen: list[list[str]] = []

    def fail_late(*arguments: Any, **more: Any) -> Any:
        seen.append(names(out.parent))
        if len(seen) == 4:
            raise DataError("unreadable")
        return encode_images(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr("training.feature_files.encode_images", fail_late)
        with pytest.raises(DataError, match="unreadable"):
            write_features(encoder, picture_shards, out, config, CPU)
    assert all(entry.startswith(".out.partial-") for entry in seen[-1] if entry != "out")
    assert names(out.parent) == (["out"] if exists else [])
    assert not exists or names(out) == []
    write_features(encoder, picture_shards, out, config, CPU)
    assert names(out) == ["000000.safetensors", "index.json"]
    assert names(out.parent) == ["out"]
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 1  # safetensors alone would make its files private


def test_a_folder_that_holds_something_is_refused(encoder: PretrainedEncoder, picture_shards: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for output in (tmp_path / "out", tmp_path / "out" / "mine.txt"):
        with pytest.raises(UserError, match="is not empty: choose a new or empty folder"):
            write_features(encoder, picture_shards, output, FeatureFilesConfig(num_workers=0), CPU)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"), new_folder(tmp_path / "file" / "out"):
        pass


def test_what_cannot_be_extracted_is_refused(encoder: PretrainedEncoder, picture_shards: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"block 7: the encoder has the blocks 1 \.\. 2"):
        write_features(encoder, picture_shards, tmp_path / "out", FeatureFilesConfig(block=7), CPU)
    without_cls = wide_encoder(depth=1, class_token=False, global_pool="avg", fc_norm=False)
    with pytest.raises(UserError, match="has no CLS token; choose patches"):
        write_features(without_cls, picture_shards, tmp_path / "out", FeatureFilesConfig(), CPU)
    with torch.no_grad():
        cast(nn.LayerNorm, encoder.model.norm).weight.mul_(1e6)
    with pytest.raises(UserError, match=r"too large for float16.*try --dtype float32"):
        write_features(encoder, picture_shards, tmp_path / "out", FeatureFilesConfig(num_workers=0), CPU)
    assert not (tmp_path / "out").exists()
    write_features(encoder, picture_shards, tmp_path / "out", FeatureFilesConfig(dtype="float32", num_workers=0), CPU)


@pytest.mark.parametrize("settings", [{"file_mib": 0}, {"batch_size": 0}, {"num_workers": -1}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        FeatureFilesConfig(**settings)
