"""Tokens of a whole data set in files: safetensors, npz or webdataset shards, of bounded size, with an index.

```
folder/
  000000.safetensors ...   or .npz, or .tar: consecutive samples each
  index.json               what encoder, what data, what tokens, and how many samples each file holds
```
Shapes: n samples of a file, D encoder width, h w patches in a column and in a row of an image.
"""

import contextlib
import dataclasses
import io
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from data.evaluation import evaluation_batches
from data.shards import NO_LABEL, ShardSet
from models.formats import PretrainedEncoder
from training.checkpoint import replacing
from training.cli import UserError
from training.features import check_block, encode_images
from training.machine import native_bfloat16

FORMAT = "mae-vit-features"
VERSION = 1
INDEX_NAME = "index.json"
MIB = 2**20

# The names of a file's samples stand in its header, which safetensors limits to 100 MB.
MAX_SAMPLES_PER_FILE = 100_000


@dataclass(frozen=True)
class FeatureFilesConfig:
    """Which tokens are written, and how."""

    tokens: Literal["cls", "patches", "both"] = "cls"
    """cls: one vector for each image; patches: a map of vectors for each image, much larger; or both."""
    block: int | None = None
    """After which block of the encoder, from 1 (None: the last). The encoder's final norm is applied to any."""
    format: Literal["safetensors", "npz", "shards"] = "safetensors"
    """Arrays in safetensors or npz files, or tar shards of webdataset with .npy members for each sample."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the numbers in the files."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the encoder's matrix products. auto: bfloat16 where the device computes in it natively, else float32."""
    file_mib: int = 256
    """About the size of a file in MiB, at least 1; arrays of twice as much are held in memory."""
    batch_size: int = 64
    """Images encoded at once, at least 1."""
    num_workers: int = 2
    """Reader processes; 0 reads in this one."""

    def __post_init__(self) -> None:
        if min(self.file_mib, self.batch_size) < 1 or self.num_workers < 0:
            raise ValueError("file_mib and batch_size must be at least 1, num_workers at least 0")


@dataclass(frozen=True)
class EncodedSamples:
    """Tokens of consecutive samples, and which samples these are."""

    tokens: dict[str, Tensor]
    """"cls" (n, D) and "patches" (n, h, w, D), or one of them; on the CPU."""
    labels: Tensor
    """(n,) int64; -1 where a sample has none."""
    indices: Tensor
    """(n,) int64: places in the data set."""
    sources: list[tuple[str, str]]
    """n times the name of the shard and the key in it."""

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, rows: slice) -> Self:
        tokens = {name: tensor[rows] for name, tensor in self.tokens.items()}
        return dataclasses.replace(
            self, tokens=tokens, labels=self.labels[rows], indices=self.indices[rows], sources=self.sources[rows]
        )


class FeatureFile(Protocol):
    """One file that is being written."""

    def add(self, samples: EncodedSamples) -> None:
        """Takes samples; they may reach the disk with `close` only."""
        ...

    def close(self) -> None:
        """Completes the file."""
        ...


class ArrayFile:
    """Samples as arrays "cls", "patches", "labels" (n,) and "indices" (n,), collected and written at the end.

    Where they come from: in npz the arrays "shards" and "keys" of text; in safetensors the entry "sources" of the header, a
    JSON list of [shard, key].
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: list[EncodedSamples] = []

    def add(self, samples: EncodedSamples) -> None:
        """Keeps samples in memory."""
        self.parts.append(samples)

    def close(self) -> None:
        """Writes the file."""
        arrays = {name: torch.cat([part.tokens[name] for part in self.parts]) for name in self.parts[0].tokens}
        arrays["labels"] = torch.cat([part.labels for part in self.parts])
        arrays["indices"] = torch.cat([part.indices for part in self.parts])
        sources = [source for part in self.parts for source in part.sources]
        with replacing(self.path) as temporary:
            if self.path.suffix == ".safetensors":
                save_file(arrays, temporary, metadata={"sources": json.dumps(sources)})
                return
            named: dict[str, Any] = {name: array.numpy() for name, array in arrays.items()}
            named |= {"shards": np.array([shard for shard, _ in sources]), "keys": np.array([key for _, key in sources])}
            with temporary.open("wb") as file:  # given a path, numpy would add a suffix
                np.savez(file, **named)


class TarShard:
    """Samples as members <index>.cls.npy, .patches.npy, .cls (the label as text) and .json (shard, key, index, label)."""

    def __init__(self, path: Path) -> None:
        self.tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 (closed by `close`)

    def add(self, samples: EncodedSamples) -> None:
        """Writes samples."""
        for row, (shard, key) in enumerate(samples.sources):
            index, label = int(samples.indices[row]), int(samples.labels[row])
            about = {"shard": shard, "key": key, "index": index, "label": None if label == NO_LABEL else label}
            members = {f"{name}.npy": _npy(tensor[row]) for name, tensor in samples.tokens.items()}
            if label != NO_LABEL:
                members["cls"] = str(label).encode()
            members["json"] = json.dumps(about).encode()
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{index:09d}.{suffix}")
                member.size = len(content)
                self.tar.addfile(member, io.BytesIO(content))

    def close(self) -> None:
        """Writes the end of the tar."""
        self.tar.close()


def _npy(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, tensor.numpy(), allow_pickle=False)
    return buffer.getvalue()


class _Layout(NamedTuple):
    suffix: str
    open_file: Callable[[Path], FeatureFile]
    overhead: int  # bytes that a sample takes beside its tokens, about


_LAYOUTS = {
    "safetensors": _Layout("safetensors", ArrayFile, 64),
    "npz": _Layout("npz", ArrayFile, 256),
    "shards": _Layout("tar", TarShard, 8 * tarfile.BLOCKSIZE),
}


def write_features(
    encoder: PretrainedEncoder, shards: ShardSet, output: Path, config: FeatureFilesConfig, device: torch.device
) -> dict[str, Any]:
    """Encodes every image of a data set, whole and centred, and writes the tokens.

    Args:
        encoder: from `load_encoder`.
        shards: the data set, with labels or without.
        output: a new folder, or an empty one; complete or as it was, whatever happens on the way.
        config: which tokens, and how.
        device: where to compute.

    Returns:
        What `index.json` holds.

    Raises:
        UserError: the folder holds something or cannot be written; the encoder has no such block or no CLS token; a number is
            too large for float16.
        DataError: an image cannot be read.
    """
    try:
        block = check_block(encoder, config.block)
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.tokens != "patches" and not encoder.model.has_class_token:
        raise UserError(f"tokens {config.tokens}: the encoder has no CLS token; choose patches")
    encoder.model.to(device)
    with new_folder(output) as folder:
        shapes, files = _write_files(_encoded(encoder, shards, block, config, device), folder, config)
        index = {
            "format": FORMAT,
            "version": VERSION,
            "layout": config.format,
            "dtype": config.dtype,
            "block": block,
            "depth": len(encoder.model.blocks),
            "tokens": shapes,
            "num_samples": len(shards),
            "files": files,
            "data": str(shards.root),
            "manifest_hash": shards.manifest.hash,
            "class_names": list(shards.manifest.class_names),
            "encoder": {
                "timm_model": encoder.timm_name,
                "timm_arguments": encoder.timm_arguments,
                "norm_eps": encoder.norm_eps,
                "mean": list(encoder.mean),
                "std": list(encoder.std),
            },
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def _encoded(
    encoder: PretrainedEncoder, shards: ShardSet, block: int, config: FeatureFilesConfig, device: torch.device
) -> Iterator[EncodedSamples]:
    bfloat16 = config.compute == "bfloat16" or (config.compute == "auto" and native_bfloat16(device.type))
    with tqdm(total=len(shards), unit="image", desc=f"features of {shards.root.name}") as bar:
        for batch in evaluation_batches(shards, encoder.img_size, encoder.in_chans, config.batch_size, config.num_workers):
            encoded = encode_images(encoder, batch.images, block, torch.bfloat16 if bfloat16 else torch.float32)
            tokens = {} if encoded.cls is None or config.tokens == "patches" else {"cls": encoded.cls}
            if config.tokens != "cls":
                tokens["patches"] = encoded.patches
            tokens = {name: tensor.to(getattr(torch, config.dtype)).cpu().contiguous() for name, tensor in tokens.items()}
            if not all(tensor.isfinite().all() for tensor in tokens.values()):
                raise UserError(
                    f"features of samples {batch.indices[0]} to {batch.indices[-1]} hold numbers too large for {config.dtype}, "
                    "or none: try --dtype float32 and --compute float32"
                )
            yield EncodedSamples(tokens, batch.labels, batch.indices, batch.sources)
            bar.update(len(batch.labels))


def _write_files(
    encoded: Iterator[EncodedSamples], folder: Path, config: FeatureFilesConfig
) -> tuple[dict[str, list[int]], list[dict[str, Any]]]:
    """Writes files of the same number of samples each, but for the last.

    Returns:
        Name of the tokens -> their shape for one sample; and for each file its name, first sample and number of samples.
    """
    layout = _LAYOUTS[config.format]
    shapes: dict[str, list[int]] = {}
    files: list[dict[str, Any]] = []
    file: FeatureFile | None = None
    capacity = 0
    for samples in encoded:
        if not shapes:
            shapes = {name: list(tensor.shape[1:]) for name, tensor in samples.tokens.items()}
            sample_bytes = sum(tensor[0].nbytes for tensor in samples.tokens.values()) + layout.overhead
            capacity = min(max(1, config.file_mib * MIB // sample_bytes), MAX_SAMPLES_PER_FILE)
        while len(samples):
            if file is None:
                name = f"{len(files):06d}.{layout.suffix}"
                file = layout.open_file(folder / name)
                files.append({"name": name, "first_sample": int(samples.indices[0]), "num_samples": 0})
            taken = samples[: capacity - files[-1]["num_samples"]]
            file.add(taken)
            files[-1]["num_samples"] += len(taken)
            samples = samples[len(taken) :]
            if files[-1]["num_samples"] == capacity:
                file.close()
                file = None
    if file is not None:
        file.close()
    return shapes, files


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Gives a folder beside `output` to write to, which becomes `output` on success and is removed otherwise.

    Raises:
        UserError: `output` is a file or holds something, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output {output} is not empty: choose a new or empty folder")
    partial = output.parent / f".{output.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        yield partial
        if output.exists():
            output.rmdir()  # empty; not every system renames over a folder
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {output}: {error}") from error
    finally:  # whatever happened, an interrupt included; after the rename there is nothing to remove
        shutil.rmtree(partial, ignore_errors=True)
