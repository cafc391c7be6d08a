"""The configuration of a pretraining run, and what is derived from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.config import DataConfig
from models.mae import MAEConfig
from training.batches import check_global_batch
from training.knn import ProbeConfig
from training.optim import OptimConfig
from training.run import RunConfig

CONFIGS = Path(__file__).parent / "configs"
DIGITS_CONFIG = CONFIGS / "digits.yaml"

MAY_CHANGE_ON_RESUME = (
    "resume",
    "output_dir",
    "run.device",
    "run.compile",
    "run.cpu_threads",
    "run.log_every_steps",
    "run.picture_every_steps",
    "run.save_every_steps",
    "run.save_every_minutes",
    "run.timeout_minutes",
    "run.keep_checkpoints",
    "run.milestone_every_epochs",
    "data.train",  # the folder may have moved: that it holds the same data is checked by the manifest's hash
    "data.num_workers",
    "data.prefetch_batches",
    "data.cache_dir",
    "data.cache_gib",
    "data.read_timeout_s",
    "data.allow_pipe",
    "data.max_bad_share",
    "data.batch_size_per_process",  # the global batch must stay the same, and is checked
    "global_batch_size",
    "optim.accum_steps",
    "probe.train",
    "probe.test",
    "probe.every_epochs",
    "probe.max_train",
    "probe.max_test",
    "probe.k",
)
"""Settings that may differ when a run is continued: none changes what is learnt."""

CHANGES_THE_RUN = ("optim.base_lr", "optim.clip_grad_norm", "run.dtype", "epochs", "num_steps")
"""Settings that may be changed too, to save a run that has become unstable or to train longer; it then says so."""


@dataclass(frozen=True)
class PretrainConfig:
    """Masked-autoencoder pretraining: hides most patches of every image and learns to restore them.

    Without --config and --data.train it trains on the embedded handwritten digits (pretrain/configs/digits.yaml).
    """

    output_dir: str = "runs/pretrain"
    """Run folder: config, logs, checkpoints, encoder, picture. Never reused for another config."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue what output_dir holds, at the step of its newest valid checkpoint; start anew where it holds nothing."""
    epochs: float = 800.0
    """Length of the run in passes over the data set, above 0."""
    num_steps: int | None = None
    """Length of the run in optimizer steps, in place of epochs, at least 1."""
    global_batch_size: int | None = None
    """Images of one optimizer step over all processes, at least 1; then the number of processes does not matter to a run. A
    process takes at most data.batch_size_per_process images at once, and optim.accum_steps is worked out. None:
    batch_size_per_process x processes x accum_steps."""
    model: MAEConfig = field(default_factory=MAEConfig)
    """The masked autoencoder."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    run: RunConfig = field(default_factory=RunConfig)
    """How the run is carried out."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """What the encoder knows, measured while it is trained."""

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be above 0 and finite, not {self.epochs}")
        if not self.output_dir:
            raise ValueError("output_dir is empty: name a folder")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")
        check_global_batch(self.global_batch_size, self.optim.accum_steps)


def with_default_data(argv: Sequence[str]) -> list[str]:
    """Puts the digits' config in front of arguments that name neither a config nor data."""
    named = {argument.split("=")[0].replace("-", "_") for argument in argv}
    if named & {"__config", "__data.train"}:
        return list(argv)
    return ["--config", str(DIGITS_CONFIG), *argv]
