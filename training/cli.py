"""YAML files and flags -> frozen dataclasses; what users get wrong -> one message and exit status 2."""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import inspect
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from data.errors import DataError

Config = TypeVar("Config")

EXIT_USER_ERROR = 2

_MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""Failures of the file system that are the user's to mend: full disk, quota, read-only, no permission."""


class UserError(ValueError):
    """A mistake that the user can mend: the message says what was given, what was expected, and what to do."""


class NoSettingsError(UserError):
    """A file can be read, but does not hold keys and values in YAML."""


def parse_args(config_type: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Reads a config from `--config FILE.yaml` and flags; a flag wins over the file, wherever it stands.

    The YAML is read as flags (nested keys joined by dots), by the same parser: an unknown key or a bad value gets the same
    message as a flag, under the name of the file.

    Args:
        config_type: a frozen dataclass, possibly nested.
        argv: arguments without the program name (None: those of this process).
        prog: program name in messages (None: that of this process).

    Raises:
        SystemExit: with status 0 after --help, with status 2 after a message about an unknown key, a bad value, or a file
            that cannot be read. Of many processes only the first prints.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    prog = prog or Path(sys.argv[0]).name
    if "-h" in argv or "--help" in argv:
        about = f"{inspect.getdoc(config_type)}\n\n--config FILE.yaml reads settings from a file; flags win over it."
        return _tyro(config_type, ["--help"], prog, description=about)
    peeler = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    peeler.add_argument("--config", type=Path, default=None)
    with user_errors():
        try:
            known, flags = peeler.parse_known_args(argv)
        except SystemExit:
            raise UserError("--config needs the path of a YAML file") from None
        file_flags = _yaml_flags(known.config, config_type) if known.config else []
    default = _tyro(config_type, file_flags, str(known.config)) if known.config else None
    return _tyro(config_type, _booleans_spelled_out(flags, config_type), prog, default)


def _booleans_spelled_out(flags: Sequence[str], config_type: type) -> list[str]:
    """Lets people write `--eval_only`, `--eval_only true` and `--eval-only=true` for `--eval_only True`."""
    booleans = {name for name, kind in _fields(config_type).items() if kind is bool}

    def is_boolean(flag: str) -> bool:
        return flag.startswith("--") and flag[2:].partition("=")[0].replace("-", "_") in booleans

    spelled: list[str] = []
    for previous, flag, following in zip(["", *flags], flags, [*flags[1:], "--"], strict=False):
        if is_boolean(flag):
            name, _, value = flag.partition("=")
            spelled += [f"{name}={value.capitalize()}"] if value else [flag]
            spelled += ["True"] if not value and following.startswith("--") else []
        else:
            spelled.append(flag.capitalize() if is_boolean(previous) and flag.lower() in ("true", "false") else flag)
    return spelled


def _tyro(
    config_type: type[Config], args: list[str], prog: str, default: Config | None = None, description: str | None = None
) -> Config:
    return tyro.cli(  # pyright: ignore[reportReturnType] (tyro gives the type of `default` too, which is Config or None)
        config_type,
        args=args,
        prog=prog,
        default=default,
        description=description,
        config=(tyro.conf.FlagConversionOff,),  # `--compile True`: booleans in YAML need no special case
        use_underscores=True,
        console_outputs=is_main_process(),
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file of keys and values; an empty file has none.

    Raises:
        UserError: the file cannot be read.
        NoSettingsError: it is not YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NoSettingsError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise NoSettingsError(f"{path}: expected keys and values, found a {type(content).__name__}")
    return content


def flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots: {"model": {"depth": 12}} -> {"model.depth": 12}."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _yaml_flags(path: Path, config_type: type) -> list[str]:
    sections = {entry.name for entry in dataclasses.fields(config_type) if dataclasses.is_dataclass(entry.default_factory)}
    # A section of which every key is commented out is None to YAML.
    content = {key: value for key, value in read_yaml(path).items() if not (value is None and key in sections)}
    flags: list[str] = []
    known = list(_fields(config_type))
    for key, value in flatten(content).items():
        if key not in known:
            raise UserError(f"{path}: unknown key {key}{_suggestion(key, known)}")
        flags += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _fields(config_type: type, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all settings of a config class, with their types."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config_type):
        section = entry.default_factory
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            found |= _fields(section, f"{prefix}{entry.name}.")
        else:
            found[prefix + entry.name] = entry.type
    return found


def _suggestion(key: str, known: list[str]) -> str:
    """The name that a mistyped key may stand for: one with the same last part, or one alike."""
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == last]
    alike = (same_end or difflib.get_close_matches(key, known, n=1))[:1]
    return f"; did you mean {alike[0]}?" if alike else ""


def config_to_yaml(config: Any) -> str:
    """Writes a config as YAML that `parse_args` reads back as an equal config."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def flat_config(config: Any) -> dict[str, Any]:
    """A config as one level of dotted names: {"model.depth": 12, ...}."""
    return flatten(_plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: what YAML and JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def is_main_process() -> bool:
    """Says whether this is the first of all processes, also before any process group exists (torchrun's RANK)."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def user_errors(every_process: bool = False) -> Iterator[None]:
    """Ends the program on a user's mistake: one line on stderr, exit status 2, no traceback.

    Args:
        every_process: print on every process. By default only the first process of each machine prints: during set-up all
            meet the same mistake.

    Raises:
        SystemExit: with status 2, in place of UserError, DataError, and OSErrors that are the user's to mend.
    """
    try:
        yield
    except (UserError, DataError) as error:
        message = str(error)
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        message = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    else:
        return
    rank = os.environ.get("RANK")
    if every_process or os.environ.get("LOCAL_RANK", "0") == "0":
        where = f" (process {rank} on {socket.gethostname()})" if every_process and rank else ""
        print(f"error{where}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_USER_ERROR)
