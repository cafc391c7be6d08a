"""Whether all processes of a run see the same run folder."""

import contextlib
import os
import secrets
import socket
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


def private_folder(folder: Path, accelerator: Accelerator) -> str | None:
    """Looks whether the machines of a run share its folder; all processes must call it.

    The first process makes an empty file for a moment, under a name that no file system can remember as missing, in the folder
    or, before there is one, in the nearest one above it; the others look for it.

    Args:
        folder: of the run.
        accelerator: of the run.

    Returns:
        A warning, on all processes; None where all see the file, on a single machine, and where no file can be made: whoever
        writes to the folder will tell.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == accelerator.num_processes:
        return None
    token = [""]
    if accelerator.is_main_process:
        with contextlib.suppress(OSError):  # see Returns
            place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
            path = place / f".{secrets.token_hex(8)}.tmp"
            path.touch()
            token = [str(path)]
    try:
        broadcast_object_list(token)
        if not token[0]:
            return None
        seen = gather_object([(_sees(Path(token[0])), socket.gethostname())])
    finally:  # also where another process is lost meanwhile: an empty run folder must stay empty
        if accelerator.is_main_process and token[0]:
            with contextlib.suppress(OSError):  # it disturbs nobody but the eye
                Path(token[0]).unlink(missing_ok=True)
    blind = [f"process {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
    if not blind:
        return None
    return (
        f"output_dir {folder} is not seen by {len(blind)} of {len(seen)} processes ({blind[0]}{', ...' if blind[1:] else ''}): "
        f"checkpoints will lie on {seen[0][1]} alone. Put output_dir on storage that all machines share, or copy it to every "
        "machine before the run is continued with --resume auto"
    )


def _sees(path: Path) -> bool:
    """Says whether a file is there; one in a folder that may not be looked into is not."""
    try:
        return path.exists()
    except OSError:
        return False
