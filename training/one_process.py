"""Programs that are one process, whatever a launcher makes of them."""

import os
from collections.abc import Mapping

from training.cli import UserError

OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""Variable that says how many copies of a command there are -> what started them."""


def num_copies(environment: Mapping[str, str], name: str) -> int:
    """How many copies a launcher's variable speaks of; 1 where it is absent, or no number."""
    value = environment.get(name, "1")
    return int(value) if value.isdecimal() else 1


def require_one_process(program: str) -> None:
    """Refuses that a launcher starts several copies of a program that is one process.

    Args:
        program: its path, as users type it.

    Raises:
        UserError: there are several copies, which would all do the same work and write the same files.
    """
    for name, launcher in ({"WORLD_SIZE": "the launcher"} | OTHER_LAUNCHERS).items():
        copies = num_copies(os.environ, name)
        if copies > 1:
            raise UserError(
                f"{launcher} started {copies} copies of {program} ({name}), and each would do the same work and write the same "
                f"files: this program is one process, start it as `python {program}`; or, where every copy has work of its "
                f"own, as `env -u {name} python {program}`"
            )
