"""Pretrains a masked autoencoder: `accelerate launch pretrain/main.py [--config FILE] [flags]`; `--help` lists all flags."""

import sys

from pretrain.config import PretrainConfig, with_default_data
from pretrain.loop import set_up, train
from training.cli import parse_args, user_errors
from training.launch import contact, mistakes_of_one, taken_apart


def main() -> int:
    """Pretrains as the command line says; gives the exit status."""
    config = parse_args(PretrainConfig, with_default_data(sys.argv[1:]))
    with taken_apart(), user_errors(), mistakes_of_one(), contact(None, config.run.timeout_minutes):
        run = set_up(config)
    with user_errors(every_process=True), contact(run.folder, config.run.timeout_minutes), run.lock:
        status = train(run)
        run.accelerator.end_training()
        return status


if __name__ == "__main__":
    sys.exit(main())
