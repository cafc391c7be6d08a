"""Fine-tunes or measures: `accelerate launch finetune/main.py --encoder RUN --data.train IMAGES`; `--help` lists all flags."""

import sys

from finetune.config import FinetuneConfig
from finetune.loop import set_up, train
from finetune.measure import measure_only
from training.cli import parse_args, user_errors
from training.launch import contact, mistakes_of_one, taken_apart


def main() -> int:
    """Fine-tunes or measures as the command line says; gives the exit status."""
    config = parse_args(FinetuneConfig)
    if config.eval_only:
        with taken_apart(), user_errors(), mistakes_of_one(), contact(None, config.run.timeout_minutes):
            measure_only(config)
        return 0
    with taken_apart(), user_errors(), mistakes_of_one(), contact(None, config.run.timeout_minutes):
        run = set_up(config)
    with user_errors(every_process=True), contact(run.folder, config.run.timeout_minutes), run.lock:
        status = train(run)
        run.accelerator.end_training()
        return status


if __name__ == "__main__":
    sys.exit(main())
