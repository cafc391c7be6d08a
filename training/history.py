"""What a run folder remembers of every start of its run: when, where, from which step, and which settings had changed.

```
folder/
  history.jsonl   one line per start: {"started": time in UTC, "step": where the run goes on, "num_processes": on all machines,
                  "changed": ["optim.base_lr 0.1 -> 0.01", ...] against the start before, "torch": version, "host": name}
  config.yaml     the settings of the last start
```
"""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from training.run import HISTORY_NAME, changed_settings, save_config, writing_to


def note_start(folder: Path, config: Any, start_step: int, num_processes: int) -> None:
    """Adds a line to `history.jsonl`, then replaces `config.yaml`; to be called on the first process, which has the lock.

    The line comes first: a program that is killed in between must not lose what had changed. A line that a crash cut off stays
    as it is, and the next one begins on a line of its own.

    Args:
        folder: of the run; made if it is absent.
        config: of the run as it is started now, a dataclass.
        start_step: optimizer steps done before.
        num_processes: of the run, on all machines.

    Raises:
        UserError: the folder cannot be written to, or its `config.yaml` cannot be read.
    """
    line = json.dumps({
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": start_step,
        "num_processes": num_processes,
        "changed": [change for name, change in changed_settings(folder, config).items() if name != "resume"],
        "torch": torch.__version__,
        "host": socket.gethostname(),
    })  # fmt: skip
    with writing_to(folder), (folder / HISTORY_NAME).open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        file.write(f"{line}\n".encode())  # in this mode always at the end
        file.flush()
        os.fsync(file.fileno())
    save_config(folder, config)
