import dataclasses
import itertools
import math
from pathlib import Path
from typing import cast

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.subsets import choose_per_class
from data.transforms import Normalization
from finetune.compare import with_random_weights
from finetune.paper_probe import PaperRecipe, paper_probe
from finetune.probe import (
    Setting,
    accuracy,
    combine,
    few_shot_accuracy,
    fit_linear_grids,
    linear_probe,
    principal_axes,
    probe_views,
    split_held_out,
)
from models.attention import Attention
from models.formats import PretrainedEncoder, load_encoder
from models.mae import MAEConfig, build_mae
from models.position import PositionKind
from pretrain.report import export_encoder
from training.cli import UserError
from training.features import extract_features
from training.knn import knn_accuracy


def clouds(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds of points in 8 dimensions, far from the origin and on unequal scales."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.eye(3, 8) * 2.5
    points = centres[labels] + torch.randn(count, 8, generator=generator)
    return points * torch.tensor([1.0, 10, 0.1, 1, 1, 5, 1, 1]) + 50, labels


@pytest.mark.parametrize("decorrelate_from", [0.0, math.inf])
def test_every_classifier_of_a_grid_is_the_one_that_torch_trains_alone(decorrelate_from: float) -> None:
    points, all_labels = clouds(70)
    parts = {"cls/1": points[:, :3], "mean/1": points[:, 3:]}
    settings = [Setting(1e-2, 0.0), Setting(1e-1, 0.3), Setting(1.0, 0.1)]
    rows = torch.arange(69, 9, -1)  # the first ten are for others
    grids = fit_linear_grids(
        parts,
        all_labels,
        rows,
        3,
        {"both/1": ("cls/1", "mean/1"), "cls/1": ("cls/1",)},
        settings,
        7,
        32,
        seed=5,
        decorrelate_from=decorrelate_from,
    )
    for (view, width), (number, setting) in itertools.product({"both/1": 8, "cls/1": 3}.items(), enumerate(settings)):
        features, labels = points[rows, :width], all_labels[rows]
        std, mean = torch.std_mean(features, dim=0)
        standard = (features - mean) / std
        if decorrelate_from == 0:
            moments = {"v": (mean, std)}
            standard = standard @ principal_axes({"v": features}, moments, ("v",), torch.arange(len(rows)))
            covariance = standard.T @ standard / len(rows)
            torch.testing.assert_close(covariance, covariance.diagonal().diag(), atol=1e-4, rtol=0)
            variances = torch.linalg.eigvalsh(torch.corrcoef(features.T))  # the axes are scaled by the root of a deviation
            torch.testing.assert_close(covariance.diagonal(), variances.sqrt(), atol=2e-2, rtol=0)
        layer = nn.Linear(features.shape[1], 3)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        groups = [
            {"params": [layer.weight], "weight_decay": setting.weight_decay},
            {"params": [layer.bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=setting.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        generator, batches = torch.Generator().manual_seed(5), []
        while len(batches) < 7:
            batches.extend(torch.randperm(60, generator=generator).split(32))
        for batch in batches[:7]:
            F.cross_entropy(layer(standard[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        alone = layer(standard)
        torch.testing.assert_close(grids[view].logits(features)[number], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(grids[view].select(number).logits(features)[0], alone, atol=1e-4, rtol=1e-4)


def test_products_see_no_numbers_that_processors_are_slow_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classifiers that are very sure have probabilities below the smallest normal float32, 1.2e-38."""
    smallest = []

    def mm(inputs: Tensor, error: Tensor) -> Tensor:
        smallest.append(error[error != 0].abs().min().item())
        return inputs @ error

    monkeypatch.setattr(torch, "mm", mm)
    points, labels = clouds(60)
    grid = fit_linear_grids({"v": points}, labels, torch.arange(60), 3, {"v": ("v",)}, [Setting(9.0, 0.0)], 20, 32, 0)["v"]
    assert grid.logits(points).softmax(dim=-1).min() < 1e-30
    assert len(smallest) == 20
    assert min(smallest) >= 1e-20


def test_classifiers_are_measured_in_pieces_as_at_once() -> None:
    points, labels = clouds(9000)
    views = {"both/1": ("mean/1", "cls/1")}
    features = {"mean/1": points[:, 3:], "cls/1": points[:, :3]}
    rows = torch.arange(0, 9000, 2)  # more than one piece of 4096
    grid = fit_linear_grids(features, labels, rows, 3, views, [Setting(1e-3, 0.0), Setting(0.1, 0.0)], 3, 512, 0)["both/1"]
    together = torch.cat([points[rows, 3:], points[rows, :3]], dim=1)
    assert torch.equal(combine({name: part[rows] for name, part in features.items()}, views["both/1"]), together)
    expected = accuracy(grid.logits(together), labels[rows])
    assert len(set(expected.tolist())) == 2
    torch.testing.assert_close(grid.accuracy(features, views["both/1"], rows, labels), expected)


def test_views_are_each_block_alone_and_all_side_by_side() -> None:
    views = probe_views(["mean/9", "cls/9", "cls/10", "mean/10"])
    assert views == {
        "cls/9": ("cls/9",), "mean/9": ("mean/9",), "both/9": ("cls/9", "mean/9"),
        "cls/10": ("cls/10",), "mean/10": ("mean/10",), "both/10": ("cls/10", "mean/10"),
        "cls/9-10": ("cls/9", "cls/10"), "mean/9-10": ("mean/9", "mean/10"),
        "both/9-10": ("cls/9", "mean/9", "cls/10", "mean/10"),
    }  # fmt: skip
    assert list(probe_views(["mean/12"])) == ["mean/12"]  # an encoder without CLS token
    assert list(probe_views(["mean/12", "cls/12"])) == ["cls/12", "mean/12", "both/12"]


def test_probe_chooses_on_held_out_samples_and_measures_on_the_test_set() -> None:
    """The view that is good on the training set is noise on the test set, and the other way round."""
    train, labels = clouds(300)
    test, test_labels = clouds(300, seed=1)
    noise = torch.randn(300, 8, generator=torch.Generator().manual_seed(2))
    result = linear_probe(
        {"cls/1": noise, "mean/1": train}, labels, {"cls/1": test, "mean/1": noise}, test_labels, 3,
        {"cls/1": ("cls/1",), "mean/1": ("mean/1",)},
        lrs=(1e-6, 1e-1), weight_decays=(0.0,), num_steps=60, batch_size=64, held_out=0.2, seed=0,
    )  # fmt: skip
    assert [view.view for view in result.views] == ["mean/1", "cls/1"]
    assert (result.chosen.view, result.chosen.setting.lr) == ("mean/1", 1e-1)
    assert result.chosen.held_out_accuracy == result.views[0].held_out_accuracy > 0.8
    assert result.chosen.test_accuracy < 0.6


def test_one_view_gives_what_it_gave_when_there_were_no_others() -> None:
    """The numbers are those of the first version of the probe, which kept weights and updates in another order."""
    train, labels = clouds(300)
    test, test_labels = clouds(300, seed=1)
    result = linear_probe(
        {"v/1": train}, labels, {"v/1": test}, test_labels, 3, {"v/1": ("v/1",)},
        lrs=(1e-4, 1e-2, 1e-1), weight_decays=(0.0, 0.1), num_steps=30, batch_size=64, held_out=0.2, seed=1,
        decorrelate_from=math.inf,
    )  # fmt: skip
    assert result.chosen.setting == Setting(0.1, 0.0)
    assert result.chosen.held_out_accuracy == pytest.approx(0.85)
    assert result.chosen.test_accuracy == pytest.approx(0.9)


def test_correlated_features_need_no_more_steps() -> None:
    """What tells the classes apart is a small difference of two large numbers."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 2
    common, difference = torch.randn(1200, generator=generator), 0.002 * (labels - 0.5)
    features = {"v": torch.stack([common + difference, common - difference], dim=1)}
    rows = torch.arange(1200)

    def score(decorrelate_from: float, dtype: torch.dtype = torch.float32) -> float:
        grids = fit_linear_grids(
            features, labels, rows, 2, {"v": ("v",)}, [Setting(1e-1, 0.0)], 60, 256, 0, dtype, decorrelate_from
        )
        return grids["v"].accuracy(features, ("v",), rows, labels).item()

    assert score(10) > 0.99
    assert score(10, torch.bfloat16) > 0.99
    assert score(math.inf) < 0.9


def test_training_images_that_cannot_spare_one_are_refused() -> None:
    features, labels = clouds(3)
    with pytest.raises(UserError, match="at least two training images of some class"):
        linear_probe({"v": features}, labels, {"v": features}, labels, 3, {"v": ("v",)}, (0.1,), (0.0,), 1, 3, 0.1, 0)


def test_only_the_chosen_classifier_is_trained_on_held_out_samples_too() -> None:
    """The test set is the held-out part, with labels that cannot be guessed."""
    generator = torch.Generator().manual_seed(0)
    features = {"cls/1": torch.randn(90, 80, generator=generator)}
    labels = torch.arange(90) % 3
    held = split_held_out(labels, 0.3, seed=4)[1]
    of_held = {"cls/1": features["cls/1"][held]}
    result = linear_probe(
        features, labels, of_held, labels[held], 3, probe_views(features),
        lrs=(1e-1,), weight_decays=(0.0,), num_steps=50, batch_size=90, held_out=0.3, seed=4,
    )  # fmt: skip
    assert result.views[0].test_accuracy == pytest.approx(result.views[0].held_out_accuracy)
    assert result.views[0].test_accuracy < 0.7
    assert result.chosen.test_accuracy == 1.0


def test_a_few_labels_do_better_the_more_they_are() -> None:
    pixels, numbers = load_digits(return_X_y=True)
    features, labels = torch.from_numpy(pixels).float(), torch.from_numpy(numbers)
    results = []
    for shots in (1, 10, 100):
        rows = torch.from_numpy(choose_per_class(labels[:1437].numpy(), None, shots, 0))
        results.append(few_shot_accuracy(features[rows], labels[rows], features[1437:], labels[1437:]))
        assert few_shot_accuracy(features[rows], labels[rows], features[1437:], labels[1437:]) == results[-1]
    for scores in zip(*results, strict=True):
        assert scores[0] > 0.4
        assert scores[0] + 0.05 < scores[1] < scores[2] - 0.01


def test_few_labels_are_classified_by_direction_from_their_mean() -> None:
    """Classes need not be numbered from 0, and a test sample far out counts like a near one."""
    train, labels = torch.tensor([[5.0, 6.0], [6.0, 5.0], [4.0, 5.0], [5.0, 4.0]]), torch.tensor([3, 5, 7, 9])
    test = torch.tensor([[5.1, 5.2], [90.0, 0.0], [-9.0, 3.0], [4.9, 4.7]])
    assert few_shot_accuracy(train, labels, test, labels).nearest_mean == 1.0
    assert few_shot_accuracy(train, labels, test, labels).logistic_regression == 1.0
    assert few_shot_accuracy(train, labels, test, labels.roll(1)) == (0.0, 0.0)
    # Of a class's samples, the one far out counts no more for the class mean either.
    train, labels = torch.tensor([[9.0, 0.0], [0.0, 1.0], [-9.0, 0.0], [0.0, -1.0]]), torch.tensor([0, 0, 1, 1])
    assert few_shot_accuracy(train, labels, torch.tensor([[-1.0, 3.0]]), labels[:1]).nearest_mean == 1.0


def test_strength_of_the_penalty_does_not_depend_on_width_or_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    points, labels = clouds(60)
    fitted, fit = [], LogisticRegression.fit

    def fit_and_keep(model: LogisticRegression, *arguments: object) -> LogisticRegression:
        fit(model, *arguments)
        fitted.append(model.intercept_)
        return model

    monkeypatch.setattr(LogisticRegression, "fit", fit_and_keep)
    for features in (points, points.repeat(1, 4), points * 100 + 7):
        few_shot_accuracy(features, labels, features, labels, strength=1.0)
    few_shot_accuracy(points, labels, points, labels, strength=10.0)
    assert fitted[1] == pytest.approx(fitted[0], abs=0.01)
    assert fitted[2] == pytest.approx(fitted[0], abs=0.01)
    assert fitted[3] != pytest.approx(fitted[0], abs=0.01)


def test_held_out_part_has_the_same_share_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2])
    kept, held = split_held_out(labels, 0.2, seed=0)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(61))
    assert torch.bincount(labels[held], minlength=3).tolist() == [10, 2, 0]
    assert not torch.equal(held, split_held_out(labels, 0.2, seed=1)[1])


def test_neighbours_vote_by_similarity() -> None:
    train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.0], [-0.9, -0.1], [-1.0, 0.1]])
    labels = torch.tensor([0, 0, 1, 1, 1])
    test, test_labels = torch.tensor([[2.0, 0.1], [-3.0, 0.0]]), torch.tensor([0, 1])
    assert knn_accuracy(train, labels, test, test_labels, 2, ks=(1, 2, 50)) == {1: 1.0, 2: 1.0, 50: 1.0}
    # Of all five, three are of class 1: without weights by similarity the first would be lost.
    assert knn_accuracy(train, labels, test, test_labels, 2, ks=(5,), temperature=1e6) == {5: 0.5}


def test_accuracy_counts_the_highest_logit() -> None:
    logits = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [2.0, 1.0]]])
    assert accuracy(logits, torch.tensor([1, 0])).tolist() == [1.0, 0.5]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_is_measured_once_and_in_order(picture_shards: ShardSet, world_size: int, num_workers: int) -> None:
    """53 samples over up to three processes in batches of 8: ragged everywhere."""
    indices = []
    for rank in range(world_size):
        for batch in evaluation_batches(picture_shards, (16, 16), 3, 8, num_workers, rank, world_size):
            indices.extend(batch.indices.tolist())
            assert torch.equal(batch.labels, torch.from_numpy(picture_shards.labels[batch.indices.numpy()].copy()))
    assert indices == list(range(53))


@pytest.fixture
def encoder(tiny_config: MAEConfig, tmp_path: Path) -> PretrainedEncoder:
    torch.manual_seed(0)
    export_encoder(tmp_path, build_mae(tiny_config), tiny_config, Normalization((0.4,) * 3, (0.2,) * 3))
    return load_encoder(str(tmp_path))


def test_features_are_those_of_the_whole_image(encoder: PretrainedEncoder, picture_shards: ShardSet) -> None:
    features = extract_features(encoder, picture_shards, 2, torch.device("cpu"), batch_size=10, num_workers=0)
    assert set(features.views) == {"cls/1", "mean/1", "cls/2", "mean/2"}
    assert features.labels.tolist() == picture_shards.labels.tolist()
    batch = next(evaluation_batches(picture_shards, (32, 32), 3, 53, 0))
    with torch.no_grad():
        tokens = encoder.model.forward_features((batch.images / 255 - 0.4) / 0.2)
    torch.testing.assert_close(features.views["cls/2"], tokens[:, 0], atol=0.05, rtol=0.05)  # bfloat16 where it is native
    torch.testing.assert_close(features.views["mean/2"], tokens[:, 1:].mean(1), atol=0.05, rtol=0.05)


def test_cached_features_come_in_the_order_in_which_they_were_computed(
    tiny_config: MAEConfig, picture_shards: ShardSet, tmp_path: Path
) -> None:
    config = dataclasses.replace(tiny_config, depth=11, embed_dim=8, num_heads=1)
    export_encoder(tmp_path, build_mae(config), config, Normalization((0.4,) * 3, (0.2,) * 3))
    deep = load_encoder(str(tmp_path))
    first, cached = (
        extract_features(deep, picture_shards, 3, torch.device("cpu"), num_workers=0, cache=tmp_path / "c") for _ in range(2)
    )
    assert list(first.views) == list(cached.views) == ["cls/9", "mean/9", "cls/10", "mean/10", "cls/11", "mean/11"]


def test_of_each_batch_only_the_features_stay_in_memory(
    encoder: PretrainedEncoder, picture_shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []
    concatenate = torch.cat

    def cat(parts: list[Tensor], dim: int = 0) -> Tensor:
        kept.extend(parts)
        return concatenate(parts, dim)

    monkeypatch.setattr("training.features.torch.cat", cat)
    extract_features(encoder, picture_shards, 2, torch.device("cpu"), batch_size=10, num_workers=0)
    features = [part for part in kept if part.ndim == 2]
    assert len(features) == 4 * 6
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in features)


def test_cached_features_are_used_again_but_not_for_other_weights(
    encoder: PretrainedEncoder, picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extract() -> Tensor:
        return extract_features(encoder, picture_shards, 1, torch.device("cpu"), num_workers=0, cache=tmp_path / "c").views[
            "cls/2"
        ]

    first = extract()
    with monkeypatch.context() as patch:
        patch.setattr("training.features.evaluation_batches", lambda *_: pytest.fail("computed again"))
        assert torch.equal(extract(), first)
    (cached,) = (tmp_path / "c").iterdir()
    cached.write_bytes(cached.read_bytes()[:100])
    assert torch.equal(extract(), first)
    other_heads = encoder._replace(timm_arguments=encoder.timm_arguments | {"num_heads": 2})
    for block in encoder.model.blocks:
        attention = cast(Attention, block.get_submodule("attn"))
        attention.num_heads, attention.head_dim = 2, 16
    same_weights = extract_features(other_heads, picture_shards, 1, torch.device("cpu"), num_workers=0, cache=tmp_path / "c")
    assert not torch.equal(same_weights.views["cls/2"], first)
    with torch.no_grad():
        encoder.model.blocks[0].get_parameter("norm1.weight").mul_(2)
    assert not torch.equal(extract(), first)


@pytest.mark.parametrize("kind", ["sincos_2d", "learned"])
def test_random_baseline_keeps_nothing_that_was_trained(tiny_config: MAEConfig, tmp_path: Path, kind: PositionKind) -> None:
    config = dataclasses.replace(tiny_config, pos_embed=kind)
    export_encoder(tmp_path, build_mae(config), config, Normalization((0.5,) * 3, (0.25,) * 3))
    trained = load_encoder(str(tmp_path)).model.state_dict()
    random = with_random_weights(load_encoder(str(tmp_path)), seed=0).model.state_dict()
    kept = {name for name, tensor in random.items() if tensor.ndim > 1 and torch.equal(tensor, trained[name])}
    assert kept == ({"pos_embed"} if kind == "sincos_2d" else set())


def test_the_papers_probe_separates_what_can_be_separated() -> None:
    """BatchNorm makes it blind to the features' scale and place."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    centres = 2 * torch.randn(3, 16, generator=generator)
    features = centres[labels] + torch.randn(600, 16, generator=generator)
    recipe = PaperRecipe(epochs=20, warmup_epochs=2, batch_size=100, base_lr=1.0)
    score, again, scaled = (
        paper_probe(values[:400], labels[:400], values[400:], labels[400:], 3, recipe, seed=0)
        for values in (features, features, 100 * features + 7)
    )
    assert score == again > 0.95
    assert scaled == pytest.approx(score, abs=0.011)


def test_a_grid_in_bfloat16_chooses_like_one_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    features = torch.randn(3, 16, generator=generator)[labels] + torch.randn(600, 16, generator=generator)
    settings = [Setting(lr, 0.0) for lr in (1e-4, 1e-2)]
    exact, rough = (
        fit_linear_grids({"a": features}, labels, torch.arange(400), 3, {"a": ("a",)}, settings, 60, 64, 0, dtype)[
            "a"
        ].accuracy({"a": features}, ("a",), torch.arange(400, 600), labels)
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(exact, rough, atol=0.03, rtol=0)
