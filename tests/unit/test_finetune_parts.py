"""The parts of fine-tuning: which samples, what happens to them, the teacher's loss, and the counting."""

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from data.config import DataConfig
from data.errors import BadImage, DataError
from data.loader import BatchLoader
from data.reader import ShardReader
from data.shards import ShardSet
from data.stream import BatchPlan, SampleOrder, SubsetOrder, sample_seeds
from data.subsets import choose_per_class, without
from data.transforms import Normalization
from finetune.augment import Mixing, RandAugment
from finetune.config import AugmentConfig, DistillConfig, FinetuneConfig, LabelledDataConfig
from finetune.distill import Teacher, distillation_loss, load_teacher
from finetune.evaluate import EvaluationSet, Scores, describe_scores, draw_confusion, evaluate, write_scores
from finetune.labelled import check_channels, check_class_names, open_training_data
from finetune.loop import seed_micro_step
from training.cli import UserError

LABELS = np.array([0] * 40 + [2] * 10 + [5] * 3)


@pytest.mark.parametrize(("share", "counts"), [(1.0, (40, 10, 3)), (0.2, (8, 2, 1)), (0.01, (1, 1, 1))])
def test_a_share_of_every_class(share: float, counts: tuple[int, ...]) -> None:
    rows = choose_per_class(LABELS, share, None, seed=0)
    assert tuple(np.bincount(LABELS[rows])[[0, 2, 5]]) == counts
    assert (np.diff(rows) > 0).all()
    assert np.array_equal(rows, choose_per_class(LABELS, share, None, seed=0))
    assert set(choose_per_class(LABELS, share / 2, None, seed=0)) <= set(rows)


def test_a_number_of_every_class() -> None:
    rows = choose_per_class(LABELS, None, 3, seed=4)
    assert tuple(np.bincount(LABELS[rows])[[0, 2, 5]]) == (3, 3, 3)
    assert not np.array_equal(rows, choose_per_class(LABELS, None, 3, seed=5))
    with pytest.raises(DataError, match="class 5 has 3 samples, 4 are wanted"):
        choose_per_class(LABELS, None, 4, seed=0)
    assert without(5, np.array([1, 4])).tolist() == [0, 2, 3]
    lonely = np.array([0, 0, 0, 1])
    assert 3 not in choose_per_class(lonely, 0.9, None, seed=0, leave_one=True)  # who holds out leaves one to learn from
    assert len(choose_per_class(lonely, 1.0, None, seed=0, leave_one=True)) == 2


def test_a_subset_is_read_once_an_epoch_with_the_seeds_of_its_samples() -> None:
    rows = np.array([3, 8, 9, 20, 41])
    order = SubsetOrder(rows, np.array([0, 10, 30, 50]), seed=7, window=3)
    stream = order.resolve(np.arange(15))
    for epoch in range(3):
        part = stream.indices[epoch * 5 : epoch * 5 + 5]
        assert sorted(part) == rows.tolist()
    assert np.array_equal(stream.seeds, sample_seeds(7, stream.epochs, stream.indices))
    assert np.array_equal(order.resolve(np.arange(4, 9)).indices, stream.indices[4:9])
    whole = SampleOrder(np.array([0, 50]), seed=7, window=50).resolve(np.arange(50))
    assert dict(zip(whole.indices, whole.seeds[:, 0], strict=True))[41] == stream.seeds[stream.indices == 41][0]


def test_a_subset_is_shuffled_over_its_shards() -> None:
    """As the whole set: the same window does not hold the same samples in every epoch."""
    rows = np.arange(0, 100, 2)
    order = SubsetOrder(rows, np.arange(0, 101, 10), seed=0, window=10)
    windows = [frozenset(order.resolve(np.arange(epoch * 50, epoch * 50 + 10)).indices.tolist()) for epoch in range(4)]
    assert len(set(windows)) > 1
    assert [order.next_to(index) for index in (0, 48, 98)] == [2, 50, 0]


def test_an_unreadable_image_is_replaced_by_one_of_the_subset(
    picture_shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: bytes, *_: object, **__: object) -> list[Tensor]:
        if data == broken:
            raise BadImage("broken")
        return [torch.zeros(3, 8, 8, dtype=torch.uint8)]

    rows = np.array([3, 10, 40])
    with ShardReader(picture_shards) as reader:
        broken = reader.read(10).data
    monkeypatch.setattr("data.loader.random_crops", decode)
    order = SubsetOrder(rows, picture_shards.first_sample, 0, 8)
    loader = BatchLoader(picture_shards, DataConfig(num_workers=0), BatchPlan(3, 1, 1, 0), order, (8, 8), 3, 0, 1)
    (one,) = list(loader)
    assert sorted(one.indices.tolist()) == [3, 40, 40]
    assert one.labels.tolist() == [picture_shards.labels[index] for index in one.indices.tolist()]
    assert len(one.faults) == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_is_a_function_of_image_and_seed(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 24, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augment = RandAugment("rand-m9-mstd0.5-inc1", (24, 20), (0.5,) * channels)
    np.random.seed(3)  # noqa: NPY002 (what the augmentation must leave alone)
    before = np.random.get_state()[1].tolist()  # noqa: NPY002 # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    first = [augment(image, seed) for seed in range(12)]
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002 # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert all(torch.equal(result, augment(image, seed)) for seed, result in enumerate(first))
    assert all(result.shape == image.shape and result.dtype == torch.uint8 for result in first)
    assert len({result.numpy().tobytes() for result in first}) > 6


def test_rand_augment_survives_its_strongest_level() -> None:
    """At level 10 timm posterizes to 0 bits, which Pillow refuses."""
    image = torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augment = RandAugment("rand-m10-n8-inc1", (16, 16), (0.5,) * 3)
    assert len({augment(image, seed).numpy().tobytes() for seed in range(60)}) > 50


def test_rand_augment_says_what_it_cannot_do() -> None:
    with pytest.raises(DataError, match="1 or 3 channels, these have 5"):
        RandAugment("rand-m9", (8, 8), (0.5,) * 5)
    with pytest.raises(DataError, match="no description that timm understands"):
        RandAugment("fancy-m9", (8, 8), (0.5,) * 3)


def augment_of(**augment: object) -> AugmentConfig:
    plain = {"rand_augment": "", "mixup": 0.0, "cutmix": 0.0, "erase_probability": 0.0, "label_smoothing": 0.0}
    return AugmentConfig(**(plain | augment))  # pyright: ignore[reportArgumentType]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(8, 3, 16, 16, generator=generator), torch.arange(8) % 4


def test_mixing_draws_from_the_step_alone() -> None:
    mixing = Mixing(augment_of(mixup=0.8, cutmix=1.0, erase_probability=0.5, label_smoothing=0.1), 4, torch.device("cpu"))

    def at(*place: int) -> Tensor:
        seed_micro_step(0, *place)
        images, labels = batch()
        mixed, targets = mixing(images, labels)
        assert targets.shape == (8, 4)
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(8))
        return mixed

    seed_micro_step(9, 9, 9, 9)
    first = at(3, 0, 0)
    assert torch.equal(first, at(3, 0, 0))
    for other in ((4, 0, 0), (3, 1, 0), (3, 0, 1)):
        assert not torch.equal(first, at(*other))


def test_label_smoothing_is_applied_once() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5]])
    log_probabilities = F.log_softmax(logits, dim=1)[0]
    expected = -(0.9 * log_probabilities[1] + 0.1 * log_probabilities.mean())
    plain = Mixing(augment_of(label_smoothing=0.1), 4, torch.device("cpu"))
    images, targets = plain(torch.zeros(1, 3, 8, 8), torch.tensor([1]))
    torch.testing.assert_close(plain.loss(logits, targets), expected)
    assert not images.any()
    mixed = Mixing(augment_of(label_smoothing=0.1, mixup=1.0), 4, torch.device("cpu"))
    _, soft = mixed(torch.zeros(2, 3, 8, 8), torch.tensor([1, 1]))  # equal labels: mixing changes nothing but the smoothing
    torch.testing.assert_close(mixed.loss(logits.expand(2, -1), soft), expected)


def test_erasing_fills_with_noise() -> None:
    seed_micro_step(0, 0, 0, 0)
    erased, _ = Mixing(augment_of(erase_probability=1.0), 4, torch.device("cpu"))(
        torch.zeros(32, 3, 16, 16), torch.zeros(32).long()
    )
    share = (erased != 0).float().mean().item()
    assert 0.02 < share < 1 / 3
    assert erased[erased != 0].std().item() == pytest.approx(1.0, abs=0.1)


def test_distillation_losses() -> None:
    student = torch.tensor([[1.0, 0.0, -2.0], [0.3, 0.2, 0.1]])
    teacher = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.1, 5.0]])
    hard = distillation_loss(student, teacher, DistillConfig(kind="hard"))
    torch.testing.assert_close(hard, F.cross_entropy(student, torch.tensor([1, 2])))
    soft = distillation_loss(student, teacher, DistillConfig(kind="soft", temperature=2.0))
    p, q = (teacher / 2).softmax(dim=1), (student / 2).softmax(dim=1)
    torch.testing.assert_close(soft, 4 * (p * (p / q).log()).sum(dim=1).mean())


def test_a_teacher_gets_its_own_normalisation_and_size() -> None:
    seen: list[Tensor] = []

    class Note(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.zeros(len(images), 2)

    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    ours, theirs = Normalization((0.5,) * 3, (0.25,) * 3), Normalization((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    Teacher(Note(), (8, 8), theirs).logits(ours.apply(pixels), ours)
    torch.testing.assert_close(seen[0], theirs.apply(pixels), atol=1e-5, rtol=1e-5)
    Teacher(Note(), (16, 12), theirs).logits(ours.apply(pixels), ours)
    assert seen[1].shape == (2, 3, 16, 12)


def test_any_timm_model_can_teach(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    config = DistillConfig(teacher="resnet10t", teacher_weights=str(tmp_path / "weights.pth"))
    teacher = load_teacher(config, [], 4, 3)
    images = torch.rand(2, 3, *teacher.img_size)
    with torch.no_grad():
        torch.testing.assert_close(teacher.logits(images, teacher.normalization), model(images))
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    for num_classes, num_channels, message in ((5, 3, "its weights cannot be had or do not fit"), (4, 1, "takes images of 3")):
        with pytest.raises(UserError, match=message):
            load_teacher(config, [], num_classes, num_channels)


class BrightnessClassifier(nn.Module):
    """Answers from the mean of the image; notes the batches it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        self.batches.append(images)
        mean = images.mean(dim=(1, 2, 3), keepdim=False)
        return torch.stack([mean, -mean], dim=1)


class OneOfMany:
    """What evaluate needs of an Accelerator; `reduce` adds up over the processes that were played one after the other."""

    device = torch.device("cpu")
    is_main_process = False

    def __init__(self, rank: int, world_size: int, sums: list[Tensor]) -> None:
        self.process_index, self.num_processes, self._sums, self._call = rank, world_size, sums, 0

    def autocast(self) -> torch.autograd.profiler.record_function:
        return torch.autograd.profiler.record_function("none")

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        assert how == "sum"
        if self._call == len(self._sums):
            self._sums.append(torch.zeros_like(tensor))
        self._sums[self._call] += tensor
        self._call += 1
        return self._sums[self._call - 1].clone()


@pytest.mark.parametrize("samples", [None, [1, 4, 9, 17, 20, 33, 51]])
def test_counts_are_the_same_over_any_number_of_processes(picture_shards: ShardSet, samples: list[int] | None) -> None:
    """53 samples in batches of 8, the last one ragged; each is counted once."""
    data = EvaluationSet(picture_shards, samples, (16, 16), 3, 1.0, 8, 0)
    normalization = Normalization((0.5,) * 3, (0.25,) * 3)
    results, inputs = [], []
    for world_size in (1, 2, 3, 9):
        sums: list[Tensor] = []
        model = BrightnessClassifier().train()
        scores = [
            evaluate(model, data, normalization, 2, cast(Accelerator, OneOfMany(rank, world_size, sums)))
            for rank in range(world_size)
        ][-1]
        assert model.training
        results.append(scores)
        inputs.append(model.batches)
    first = results[0]
    labels = np.asarray(picture_shards.labels)[samples if samples is not None else slice(None)]
    assert first.num_samples == len(data)
    assert first.confusion.sum(axis=1).tolist() == np.bincount(labels).tolist()
    logits = torch.cat([torch.stack([m := i.mean(dim=(1, 2, 3)), -m], dim=1) for i in inputs[0]])
    assert first.top1 == pytest.approx((logits.argmax(dim=1).numpy() == labels).mean())
    assert first.loss == pytest.approx(F.cross_entropy(logits, torch.tensor(labels)).item(), rel=1e-6)
    for scores, batches in zip(results[1:], inputs[1:], strict=True):
        assert np.array_equal(scores.confusion, first.confusion)
        assert scores.num_top5 == first.num_top5 == len(data)
        assert scores.loss == pytest.approx(first.loss, rel=1e-12)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(batches, inputs[0], strict=True))


def scores() -> Scores:
    return Scores(np.array([[3, 1, 0], [0, 0, 0], [2, 0, 2]]), num_top5=8, loss=0.5)


def test_scores_and_their_files(tmp_path: Path) -> None:
    assert (scores().num_samples, scores().top1, scores().top5) == (8, 5 / 8, 1.0)
    assert scores().per_class[[0, 2]].tolist() == [0.75, 0.5]
    assert math.isnan(scores().per_class[1])
    assert "worst classes: c 50.0%, a 75.0%" in describe_scores(scores(), ["a", "b", "c"])
    write_scores(tmp_path / "out", scores(), ["a", "b", "c"], {"data": "here"})
    summary = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert summary == {"data": "here", "num_samples": 8, "top1": 0.625, "top5": 1.0, "loss": 0.5}
    with (tmp_path / "out" / "confusion.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["label \\ answer", "a", "b", "c"], ["a", "3", "1", "0"], ["b", "0", "0", "0"], ["c", "2", "0", "2"],
        ]  # fmt: skip
    with (tmp_path / "out" / "per_class.csv").open(newline="") as file:
        assert list(csv.reader(file))[1:] == [["a", "4", "0.75"], ["b", "0", "nan"], ["c", "4", "0.5"]]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the scores"):
        write_scores(tmp_path / "file", scores(), [], {})


@pytest.mark.parametrize("num_classes", [2, 60, 600])
def test_a_confusion_matrix_is_dark_where_answers_are(num_classes: int) -> None:
    confusion = np.eye(num_classes, dtype=np.int64)
    confusion[0] = np.roll(confusion[0], 1)  # class 0 is taken for class 1
    pixels = np.asarray(draw_confusion(Scores(confusion, num_classes, 0.0), []).convert("L"))
    cell = max(1, 640 // num_classes)
    left = pixels.shape[1] - 12 - cell * num_classes

    def at(row: int, column: int) -> int:
        return int(pixels[40 + row * cell + cell // 8, left + column * cell + cell // 8])

    assert at(0, 1) < 100 < 200 < at(0, 0)
    assert at(num_classes - 1, num_classes - 1) < 120


def test_training_data(picture_shards: ShardSet) -> None:
    root = str(picture_shards.root)
    held_out = open_training_data(LabelledDataConfig(train=root, held_out=0.2), seed=0)
    assert held_out.val is held_out.train
    assert held_out.val_rows is not None
    assert sorted([*held_out.rows, *held_out.val_rows]) == list(range(53))
    assert np.bincount(held_out.train.labels[held_out.val_rows]).tolist() == [5, 5]
    few = open_training_data(LabelledDataConfig(train=root, held_out=0.2, per_class=3), seed=0)
    assert np.bincount(few.train.labels[few.rows]).tolist() == [3, 3]
    assert set(few.rows) <= set(held_out.rows)
    assert (few.class_names, few.num_classes) == (("even", "odd"), 2)
    given = open_training_data(LabelledDataConfig(train=root, val=root, fraction=0.5), seed=0)
    assert given.val_rows is None
    assert len(given.rows) == 27  # 13.5 -> 14 of 27, and 13 of 26
    nothing = open_training_data(LabelledDataConfig(train=root, held_out=0.0), seed=0)
    assert (nothing.val, len(nothing.rows)) == (None, 53)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ""}, "no labelled data given"),
        ({"per_class": 100}, r"class 0 has 24 samples, 100 are wanted of every class: lower --data\.per_class"),
        ({"val": "digits-test"}, "only the first has even, odd; only the second has 0, 1, 2, 3, 4 and 5 more"),
    ],
)
def test_training_data_that_does_not_fit(picture_shards: ShardSet, settings: dict[str, object], message: str) -> None:
    config = dataclasses.replace(LabelledDataConfig(train=str(picture_shards.root)), **settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises((DataError, UserError), match=message):
        open_training_data(config, seed=0)


class FakeManifest:
    class_names: tuple[str, ...] = ("cat", "dog")
    num_channels = 5


class FakeShards:
    """Labels and names, as ShardSet has them."""

    root = Path("there")
    manifest = FakeManifest()

    def __init__(self, labels: list[int]) -> None:
        self.labels = np.array(labels)


def test_class_maps_are_checked() -> None:
    shards = cast(ShardSet, FakeShards([0, 1, 1]))
    check_class_names(("cat", "dog"), 2, shards, "here")
    check_class_names((), 2, shards, "here")
    with pytest.raises(UserError, match="class 0 is dog in the first and cat in the second: the order differs"):
        check_class_names(("dog", "cat"), 2, shards, "here")
    with pytest.raises(UserError, match="only the first has fox; only the second has nothing"):
        check_class_names(("cat", "dog", "fox"), 3, shards, "here")
    with pytest.raises(UserError, match=r"1 labels are outside 0 \.\. 1 \(sample 2 has 4\)"):
        check_class_names(("cat", "dog"), 2, cast(ShardSet, FakeShards([0, 1, 4])), "here")


def test_channels_are_checked(picture_shards: ShardSet) -> None:
    check_channels(picture_shards, 1, "the encoder x")  # colour becomes grey
    check_channels(cast(ShardSet, FakeShards([0])), 5, "the encoder x")
    with pytest.raises(UserError, match="have 5 channels, the encoder x takes 3"):
        check_channels(cast(ShardSet, FakeShards([0])), 3, "the encoder x")


def test_weights_of_sources_are_for_pretraining() -> None:
    with pytest.raises(UserError, match=r"data\.weights is for pretraining"):
        open_training_data(LabelledDataConfig(train="x", weights=(1.0, 2.0)), seed=0)


@pytest.mark.parametrize(
    ("labels", "message"), [([1, 1], "all images are of one class"), ([0, 5000], "labels reach 5000, but only 2")]
)
def test_labels_that_make_no_classes_are_refused(labels: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = FakeShards(labels)
    shards.manifest = FakeManifest()
    shards.manifest.class_names = ()
    monkeypatch.setattr("finetune.labelled.open_source", lambda *_, **__: shards)
    with pytest.raises(UserError, match=message):
        open_training_data(LabelledDataConfig(train="x"), seed=0)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (LabelledDataConfig, {"held_out": 1.0}, r"data\.held_out"),
        (LabelledDataConfig, {"fraction": 0.0}, r"data\.fraction"),
        (LabelledDataConfig, {"fraction": 0.5, "per_class": 3}, "give one of the two"),
        (LabelledDataConfig, {"per_class": 0}, r"data\.per_class"),
        (LabelledDataConfig, {"eval_crop_pct": 1.5}, r"data\.eval_crop_pct"),
        (AugmentConfig, {"erase_probability": 1.5}, r"augment\.erase_probability"),
        (AugmentConfig, {"mixup": -1.0}, r"augment\.mixup"),
        (AugmentConfig, {"label_smoothing": 1.0}, r"augment\.label_smoothing"),
        (DistillConfig, {"alpha": 2.0}, r"distill\.alpha"),
        (DistillConfig, {"temperature": 0.0}, r"distill\.temperature"),
        (FinetuneConfig, {"ema_decay": 1.0}, "ema_decay"),
        (FinetuneConfig, {"data": LabelledDataConfig(batch_size_per_process=7)}, "must be even, not 7"),
    ],
)
def test_config_ranges(section: type, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)
