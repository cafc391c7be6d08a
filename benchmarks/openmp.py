"""How long OpenMP threads should spin: training steps on an idle machine, and beside two busy programs.

python benchmarks/openmp.py [--rounds 3]

Each measurement is a program of its own, because the library reads the setting when it is loaded; the settings take turns.
Decides the value in training/openmp.py. Only where torch uses GNU's OpenMP (Linux).
"""

import argparse
import os
import statistics
import subprocess
import sys

from training.machine import available_cores

SPINS = ("300000", "20000", "3000", "0")
PROGRAM = """
import time, torch
from models.mae import MAEConfig, build_mae
torch.set_num_threads({cores})
model = build_mae(MAEConfig(name="tiny", img_size=(32, 32), patch_size=4, embed_dim=96, depth=4, num_heads=3))
images, noise = torch.randn(64, 3, 32, 32), torch.rand(64, 64)
for number in range(13):
    if number == 3:
        start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images, noise).loss
    loss.backward()
print(640 / (time.perf_counter() - start))
"""


def images_per_s(spins: str) -> float:
    """Speed of a fresh program with a setting."""
    done = subprocess.run(  # noqa: S603 (our own program)
        [sys.executable, "-c", PROGRAM.format(cores=available_cores())],
        env=os.environ | {"GOMP_SPINCOUNT": spins},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    """Prints the median speed of each setting, idle and busy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{available_cores()} cores, {args.rounds} rounds; images/s, median (all)")
    for name, num_busy in (("idle", 0), ("beside two busy programs", 2)):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
        try:
            speeds: dict[str, list[float]] = {spins: [] for spins in SPINS}
            for _ in range(args.rounds):
                for spins in SPINS:
                    speeds[spins].append(images_per_s(spins))
        finally:
            for program in busy:
                program.kill()
        for spins, values in speeds.items():
            print(f"{name:>25}, spin {spins:>6}: {statistics.median(values):6.0f} ({', '.join(f'{v:.0f}' for v in values)})")


if __name__ == "__main__":
    main()
