"""A run goes on without what started it: a reader of what it prints, and a launcher."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any, cast

from tqdm import tqdm

LOOK_S = 1.0
"""So often a process looks whether its launcher is still there."""
_LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch")


class LastingOutput:
    """A stream of text whose reader may go: what is written from then on goes nowhere, and is no error.

    The reader is the other end of a pipe (`| tee` ends of the same Ctrl-C that stops the run), a terminal that is closed, or a
    disk that is full. What matters of a run is in its folder.

    Args:
        stream: to write to.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, or loses, a text; gives its length."""
        try:
            self._stream.write(text)
        except BlockingIOError:  # the reader is there, and slow: this text alone is lost
            pass
        except OSError:
            self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hands on what was written, or loses it."""
        try:
            self._stream.flush()
        except BlockingIOError:  # as above
            pass
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Lets the file itself lead nowhere: others write to it past this stream, and Python once more at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def unattended() -> Iterator[None]:
    """Keeps a run from being lost with what started it; may be entered again inside.

    - Where nobody reads what is printed any more, the run goes on.
    - Where its launcher has ended, by a signal that it does not hand on (SIGTERM and SIGHUP end `accelerate launch` of one
      process, SIGUSR1 all launchers), the run is asked to save and to end, as by SIGUSR1: else it would go on unseen, and keep
      its folder to itself. It is asked as soon as it listens for signals: while it is put together, nothing would be saved.
    """
    if isinstance(sys.stderr, LastingOutput):
        yield
        return
    ended = threading.Event()
    out, err = (cast(IO[str], LastingOutput(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        watcher = threading.Thread(target=_watch_launcher, args=(_launcher(), ended), name="launcher", daemon=True)
        if hasattr(signal, "SIGUSR1") and _launcher() is not None:  # Windows knows no such signal
            watcher.start()
        try:
            yield
        finally:
            ended.set()
            if watcher.ident is not None:
                watcher.join()


def has_launcher() -> bool:
    """Says whether this process's parent is torchrun or `accelerate launch`; a shell may end before it, and means nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:  # only Linux has it: elsewhere a launcher of one process is not known
        return False
    return any(PurePath(word).name in _LAUNCHERS for word in words[:3])  # after Python, and perhaps its -m


@functools.cache
def _launcher() -> int | None:
    """The launcher's number, None where there is none; as it was at first, for it may end while a run is put together."""
    return os.getppid() if has_launcher() else None


def _watch_launcher(launcher: int | None, ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        if os.getppid() != launcher and callable(signal.getsignal(signal.SIGUSR1)):  # `StopRequest` listens
            who = f"process {os.environ.get('RANK', '0')}"  # the first one to notice ends all: any may be it
            tqdm.write(f"warning ({who}): the launcher has ended without its processes: they save and end too", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGUSR1)
            return
