import errno
import os
import re
import socket
from pathlib import Path

import pytest
import yaml

import finetune
from finetune.config import AugmentConfig, FinetuneConfig
from pretrain.config import DIGITS_CONFIG, PretrainConfig, with_default_data
from training.cli import UserError, config_to_yaml, flat_config, parse_args, user_errors


def parse(*argv: str) -> PretrainConfig:
    return parse_args(PretrainConfig, argv, prog="main.py")


def refused(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed when arguments are refused with status 2."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return " ".join((out + err).replace("│", " ").split())


def test_flag_wins_over_file_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("epochs: 7\nmodel: {name: small, img_size: [96, 160], patch_size: null}\noptim: {base_lr: 1e-3}\n")
    for argv in (["--config", str(file), "--model.name", "tiny"], ["--model.name", "tiny", "--config", str(file)]):
        config = parse(*argv)
        assert config.model.name == "tiny"
        assert config.epochs == 7
        assert config.model.img_size == (96, 160)
        assert config.model.patch_size is None
        assert config.optim.base_lr == 1e-3  # a string to YAML, a number to the flag


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model.norm_pix_loss", "False", "--run.compile", "True", "--num_steps", "3"],
        ["--data.mean", "0.1", "0.2", "--data.std", "1", "2", "--data.train", "/some where/{000..009}.tar"],
        ["--optim.clip_grad_norm", "1", "--optim.min_lr", "1e-6", "--output_dir", "x y"],
    ],
)
def test_saved_config_reads_back_equal(tmp_path: Path, flags: list[str]) -> None:
    config = parse(*flags)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert parse("--config", str(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize("path", sorted(DIGITS_CONFIG.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert parse("--config", str(path)) != PretrainConfig()


FINETUNE_CONFIGS = Path(finetune.__file__).parent / "configs"


@pytest.mark.parametrize("path", sorted(FINETUNE_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_of_fine_tuning_are_valid(path: Path) -> None:
    assert parse_args(FinetuneConfig, ["--config", str(path)], prog="main.py") != FinetuneConfig()


def test_published_recipes_are_the_papers() -> None:
    """facebookresearch/mae FINETUNE.md: epochs, base lr, layer decay, drop path."""
    for name, recipe in {"base": (100, 5e-4, 0.65, 0.1), "large": (50, 1e-3, 0.75, 0.2), "huge": (50, 1e-3, 0.75, 0.3)}.items():
        config = parse_args(FinetuneConfig, ["--config", str(FINETUNE_CONFIGS / f"vit_{name}.yaml")], prog="main.py")
        assert (config.epochs, config.optim.base_lr, config.optim.layer_decay, config.model.drop_path_rate) == recipe
        assert (config.optim.weight_decay, config.optim.beta2, config.optim.min_lr) == (0.05, 0.999, 1e-6)
        assert config.augment == AugmentConfig("rand-m9-mstd0.5-inc1", 0.25, 0.8, 1.0, 1.0, 0.1)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--eval_only"], (True, False)),
        (["--eval_only", "true"], (True, False)),
        (["--eval-only=false", "--from_scratch"], (False, True)),
        (["--from-scratch", "--eval_only", "True"], (True, True)),
        (["--eval_only", "--output_dir", "true"], (True, False)),
    ],
)
def test_booleans_are_taken_as_people_write_them(argv: list[str], expected: tuple[bool, bool]) -> None:
    config = parse_args(FinetuneConfig, argv, prog="main.py")
    assert (config.eval_only, config.from_scratch) == expected
    assert config.output_dir == ("true" if "--output_dir" in argv else "")


def test_unknown_flag_is_refused_with_a_suggestion(capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(capfd, "--model.nam", "tiny")
    assert "--model.nam" in message
    assert "Perhaps you meant: --model.name" in message
    assert refused(capfd, "--mask_ratio", "0.5").count("--model.mask_ratio")


def test_unknown_key_in_a_file_is_refused_with_a_suggestion_and_the_files_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  mask_ration: 0.5\n")
    message = refused(capfd, "--config", str(file))
    assert message == f"error: {file}: unknown key model.mask_ration; did you mean model.mask_ratio?"
    file.write_text("base_lr: 1\n")
    assert "unknown key base_lr; did you mean optim.base_lr?" in refused(capfd, "--config", str(file))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--epochs", "many"], "--epochs"),
        (["--model.name", "giant"], "'tiny', 'small', 'base', 'large', 'huge'"),
        (["--epochs", "-1"], "epochs must be above 0"),
        (["--data.crop_scale", "0", "1"], "data.crop_scale"),
        (["--run.compile", "yes"], "'True', 'False'"),
        (["--epochs", "nan"], "epochs must be above 0 and finite"),
        (["--run.seed", "99999999999"], "run.seed must lie in"),
        (["--optim.base_lr", "nan"], "optim.base_lr must be above 0 and finite"),
        (["--output_dir", ""], "output_dir is empty"),
        (["--config"], "--config needs the path"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_bad_values_are_refused_by_name(capfd: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert expected in refused(capfd, *argv)


@pytest.mark.parametrize(("text", "expected"), [("a: [", "is not YAML"), ("- 1\n", "expected keys and values")])
def test_files_that_are_no_config_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert expected in refused(capfd, "--config", str(tmp_path / "bad.yaml"))


def test_of_many_processes_only_the_first_prints(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(capfd, "--model.nam", "tiny") == ""
    assert refused(capfd, "--config", "/nowhere.yaml") == ""
    with pytest.raises(SystemExit), user_errors(every_process=True):
        raise UserError("disk full")
    assert capfd.readouterr().err == f"error (process 1 on {socket.gethostname()}): disk full\n"


def test_help_shows_every_field_with_its_meaning(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capfd.readouterr().out
    for name in flat_config(PretrainConfig()):
        assert f"--{name}" in text
    # A field without a docstring would show nothing between its type and its default.
    words = " ".join(text.replace("│", " ").split())
    for name in flat_config(PretrainConfig()):
        described = words.split(f"--{name} ", 1)[1].split("(default:")[0]
        assert re.search(r"[a-z]{3,}.* [a-z]{2,}", described), name
    assert "Share of the patches that are hidden" in words
    assert "--config FILE.yaml" in words


def test_without_data_the_digits_are_trained_on() -> None:
    assert parse(*with_default_data(["--epochs", "2"])).data.train == "digits"
    assert parse(*with_default_data(["--epochs", "2"])).epochs == 2
    assert with_default_data(["--data.train", "x"]) == ["--data.train", "x"]
    assert with_default_data(["--data.train=x"]) == ["--data.train=x"]
    assert with_default_data(["--config", "x"]) == ["--config", "x"]


def test_a_section_without_keys_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model:\n  # depth: 3\nepochs: 5\n")
    assert parse("--config", str(tmp_path / "a.yaml")) == parse("--epochs", "5")


@pytest.mark.parametrize(("number", "mendable"), [(errno.ENOSPC, True), (errno.EACCES, True), (errno.EBADF, False)])
def test_a_full_disk_is_the_users_to_mend_and_a_bug_is_not(
    capfd: pytest.CaptureFixture[str], number: int, mendable: bool
) -> None:
    def fail() -> None:
        with user_errors():
            raise OSError(number, os.strerror(number), "/some/file")

    with pytest.raises(SystemExit if mendable else OSError):
        fail()
    assert capfd.readouterr().err == (f"error: {os.strerror(number)}: /some/file\n" if mendable else "")


def test_config_is_small_enough_to_know() -> None:
    """More than 64 settings nobody reads: a new one is to replace an old one, or to become a constant."""
    assert len(flat_config(PretrainConfig())) <= 64
    assert yaml.safe_load(config_to_yaml(PretrainConfig()))["model"]["img_size"] == [224, 224]
