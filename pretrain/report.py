"""What a run says of itself at its start and at its end."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from data.config import describe_reading
from data.shards import ShardSet
from data.stream import BatchPlan
from data.transforms import Normalization
from models.encoder import count_parameters
from models.formats import encoder_state, timm_model
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from pretrain.config import PretrainConfig
from training.checkpoint import replacing
from training.parallel import Distributed
from training.schedule import Horizon, scale_lr


def forward_gflops(config: MAEConfig) -> float:
    """Counts the GFLOPs (a multiply-add is two) of one image's forward pass, on shapes alone."""
    with torch.device("meta"):
        model = build_mae(config)
        images = torch.empty(1, config.in_chans, *config.img_size)
        noise = torch.empty(1, model.encoder.num_patches)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images, noise)
    return counter.get_total_flops() / 1e9


def describe_run(
    config: PretrainConfig,
    shards: ShardSet,
    distributed: Distributed[MaskedAutoencoder],
    horizon: Horizon,
    plan: BatchPlan,
    device: torch.device,
    dtype: str,
) -> str:
    """Answers what a person asks before a long run, one line a question."""
    model, encoder = distributed.model, distributed.model.encoder
    peak_lr = scale_lr(config.optim.base_lr, plan.global_batch_size)
    epochs = horizon.num_steps * plan.global_batch_size / len(shards)
    height, width = config.model.img_size
    lines = {
        "data": f"{shards.root}: {len(shards):,} images in {len(shards.manifest.shards):,} shards",
        "reading": describe_reading(shards, config.data, plan.world_size),
        "input": f"{config.model.in_chans} x {height} x {width} px, patches of {encoder.patch_size} px",
        "model": f"ViT-{config.model.name}: encoder {encoder.embed_dim} wide x {len(encoder.blocks)} blocks, "
        f"{count_parameters(encoder) / 1e6:.2f} M parameters; "
        f"decoder {model.decoder.mask_token.shape[-1]} x {len(model.decoder.decoder_blocks)}, "
        f"{count_parameters(model.decoder) / 1e6:.2f} M",
        "tokens": f"{encoder.num_patches} patches, {model.num_kept} visible ({config.model.mask_ratio:.0%} hidden)",
        "compute": f"{forward_gflops(config.model):.3g} GFLOPs per image forward, about three times that with backward",
        "batch": f"{plan.global_batch_size:,} = {plan.batch_size_per_process} per process x {plan.world_size} "
        f"process{'es' if plan.world_size > 1 else ''} x {plan.accum_steps} accumulated",
        "lr": f"base {config.optim.base_lr:g} per 256 images, peak {peak_lr:.3g}",
        "steps": f"{horizon.num_steps:,} ({epochs:.4g} epochs), warm-up {horizon.warmup_steps:,.0f}",
        "device": f"{device.type}, {dtype}{', compiled' if config.run.compile else ''}{distributed.describe()}",
        "output": config.output_dir,
    }
    return "\n".join(f"{name:>8}  {text}" for name, text in lines.items())


def export_encoder(folder: Path, model: MaskedAutoencoder, config: MAEConfig, normalization: Normalization) -> None:
    """Writes `encoder.safetensors` with timm's names, and `encoder.json`: how to build it and what its input must be."""
    name, arguments = timm_model(config)
    record: dict[str, Any] = {
        "timm_model": name,
        "timm_arguments": arguments,
        "mean": list(normalization.mean),
        "std": list(normalization.std),
        "pos_embed": config.pos_embed,
    }
    with replacing(folder / "encoder.safetensors") as temporary:
        save_file(encoder_state(model), temporary, metadata={"encoder": json.dumps(record)})
    with replacing(folder / "encoder.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def next_commands(folder: Path, data: str) -> str:
    """What a person can type after a run.

    Args:
        folder: of the run.
        data: what `data.train` named: for the digits the commands are complete, for other data two names are left open.
    """
    digits = data.startswith("digits")
    train, test = ("digits-train", "digits-test") if digits else ("LABELLED_TRAIN", "LABELLED_TEST")
    sets = f"--encoders {folder} --train {train} --test {test}"
    brief = " --num_steps 200 --seeds 1" if digits else ""
    recipe = "digits" if digits else "vit_base"
    tuned = f"--config finetune/configs/{recipe}.yaml --encoder {folder} --output_dir {folder}-finetuned"
    named = "" if digits else f" --data.train {train} --data.val {test}"
    return "\n".join(
        [
            f"see the pictures and curves:  tensorboard --logdir {folder}",
            f"look at what was learnt:      {folder / 'reconstruction.png'}",
            f"ask its nearest neighbours:   python scripts/knn_probe.py {sets} --random_baseline",
            f"train linear classifiers:     python scripts/linear_probe.py {sets}{brief}",
            f"fine-tune on labels:          accelerate launch finetune/main.py {tuned}{named}",
            "use the encoder in Python:",
            "  import json, pathlib, timm",
            f'  how = json.loads(pathlib.Path("{folder / "encoder.json"}").read_text())  # with mean and std for its input',
            f'  model = timm.create_model(how["timm_model"], checkpoint_path="{folder / "encoder.safetensors"}",',
            '                            **how["timm_arguments"])',
            "  features = model.eval().forward_features(images)",
        ]
    )
