"""The arrows between the rooms, read from the imports (see README, "How it is laid out")."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import models

ROOT = Path(__file__).parent.parent
OURS = {"models", "data", "training", "pretrain", "finetune", "scripts", "benchmarks", "tests"}

MAY_IMPORT = {
    "models": set(),
    "data": set(),
    "training": {"models", "data"},
    "pretrain": {"models", "data", "training"},
    "finetune": {"models", "data", "training"},
    "scripts": {"models", "data", "training", "pretrain", "finetune"},
    "benchmarks": {"models", "data", "training", "pretrain", "finetune"},
}
"""Room -> rooms of ours that it may import, besides itself."""

MUST_NOT_IMPORT = {
    "models": {"accelerate", "torch.distributed", "webdataset", "tyro", "tensorboard"},
    "data": {"accelerate", "torch.distributed", "timm", "tyro"},
}
"""Room -> packages of others that it may not know."""


def imports_of(source: str) -> Iterator[str]:
    """Dotted names that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(room: str, source: str) -> list[str]:
    """Imports of a module in a room that the rules forbid."""
    found = []
    for name in imports_of(source):
        top = name.split(".")[0]
        if top in OURS - {room} - MAY_IMPORT[room]:
            found.append(name)
        if any(name == banned or name.startswith(f"{banned}.") for banned in MUST_NOT_IMPORT.get(room, ())):
            found.append(name)
        if top in OURS and name.split(".")[1:2] == ["main"] and room != "tests":
            found.append(name)  # nothing imports an entry point
    return found


def modules() -> list[Path]:
    return sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert violations(room, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("models", "import accelerate"),
        ("models", "from torch import distributed"),
        ("models", "def late():\n    from data.shards import open_shards"),
        ("data", "from models.mae import build_mae"),
        ("data", "from accelerate.utils import set_seed"),
        ("training", "import pretrain.loop"),
        ("pretrain", "from finetune.config import FinetuneConfig"),
        ("scripts", "from pretrain.main import main"),
    ],
)
def test_the_rules_catch_what_they_are_for(room: str, source: str) -> None:
    assert violations(room, source)


def test_the_installed_packages_are_this_checkout() -> None:
    assert Path(models.__file__ or "").is_relative_to(ROOT)


def test_no_entry_point_folder_shadows_a_module() -> None:
    """A script's own folder comes first on the path: a file named like a package would be imported in its place."""
    taken = OURS | {
        "torch",
        "timm",
        "logging",
        "types",
        "random",
        "signal",
        "queue",
        "select",
        "copy",
        "math",
        "platform",
    }
    for room in ("pretrain", "finetune", "scripts"):
        names = {path.stem for path in (ROOT / room).glob("*.py")}
        assert not names & taken
