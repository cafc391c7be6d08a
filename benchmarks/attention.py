"""Plain matmul attention against torch's fused call, forward and backward, by dtype and length.

python benchmarks/attention.py

What it prints decides `CPU_PLAIN_MAX_KEYS` in models/attention.py.
"""

import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.interleave import interleave, machine, median_ratio

SHAPES = [
    (128, 3, 17, 64), (128, 4, 65, 32), (32, 12, 50, 64), (32, 16, 197, 32), (8, 12, 197, 64), (4, 12, 577, 64),
    (2, 12, 785, 64), (2, 12, 1025, 64), (1, 12, 2049, 64), (1, 12, 4097, 64),
]  # fmt: skip
"""(B, heads, L, d): encoders on visible tokens, decoders, whole images, large images."""


def plain(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As `models.attention.attend` computes it."""
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
    return scores.softmax(dim=-1).to(values.dtype) @ values


def main() -> None:
    """Prints one row a shape and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(machine())
    print(f"{'dtype':>9} {'B':>4} {'heads':>5} {'L':>5} {'d':>3} {'plain ms':>9} {'fused ms':>9} {'fused/plain':>11}")
    for dtype in (torch.float32, torch.bfloat16):
        for batch, heads, length, width in SHAPES:
            stacked = torch.randn(3, batch, heads, length, width, device=device, dtype=dtype, requires_grad=True)

            def step(attend, stacked: Tensor = stacked) -> None:
                attend(*stacked.unbind(0)).sum().backward()

            seconds = interleave(
                {"plain": lambda step=step: step(plain), "fused": lambda step=step: step(F.scaled_dot_product_attention)},
                rounds=7,
            )
            plain_ms, fused_ms = (statistics.median(seconds[name]) * 1e3 for name in ("plain", "fused"))
            ratio = median_ratio(seconds, "fused", "plain")
            name = str(dtype).removeprefix("torch.")
            print(f"{name:>9} {batch:4} {heads:5} {length:5} {width:3} {plain_ms:9.1f} {fused_ms:9.1f} {ratio:11.2f}")


if __name__ == "__main__":
    main()
