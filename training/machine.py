"""What the machine has: cores, memory, native number types."""

import os

import psutil
import torch


def available_cores() -> int:
    """CPU cores that this process may use: fewer than the machine has, where a scheduler or container says so."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def best_device() -> torch.device:
    """The accelerator (CUDA, MPS, ...) where there is one that works, else the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build names CUDA without a card, too
    return torch.device("cpu") if device is None else device


def native_bfloat16(device_type: str) -> bool:
    """Says whether a device multiplies bfloat16 matrices in hardware, rather than by way of float32."""
    if device_type == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    if device_type == "cpu":
        if not hasattr(torch.cpu, "get_capabilities"):  # older torch: nobody to ask, --run.dtype decides
            return False
        flags = torch.cpu.get_capabilities()
        return bool(flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16"))
    return False


def cores_per_process() -> int:
    """CPU cores that this process may use, divided among the processes that the launcher started on this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def memory_mib(device: torch.device) -> float:
    """Memory in MiB: the peak that torch allocated on a CUDA device, else what this process occupies now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return psutil.Process().memory_info().rss / 2**20
