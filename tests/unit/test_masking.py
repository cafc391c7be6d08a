import pytest
import torch

from models.masking import is_hidden, num_kept, seeded_noise, split_by_noise


@pytest.mark.parametrize("ratio", [-0.5, 0.0, 1.0, 1.2])
def test_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        num_kept(16, ratio)


@pytest.mark.parametrize(("num_patches", "ratio"), [(4, 0.9), (4, 0.0001)])
def test_ratio_that_leaves_nothing_is_refused(num_patches: int, ratio: float) -> None:
    if ratio < 0.5:
        assert num_kept(num_patches, ratio) == 3  # truncation always hides at least one
    else:
        with pytest.raises(ValueError, match="at least one of each"):
            num_kept(num_patches, ratio)


def test_split_is_a_partition_with_the_smallest_noise_kept() -> None:
    noise = torch.rand(7, 50)
    ids_keep, ids_hidden = split_by_noise(noise, 12)
    together = torch.cat([ids_keep, ids_hidden], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(50).expand(7, -1))
    assert (noise.gather(1, ids_keep).amax(1) <= noise.gather(1, ids_hidden).amin(1)).all()
    assert torch.equal(is_hidden(ids_hidden, 50).sum(1), torch.full((7,), 38))


def test_noise_depends_on_the_image_alone() -> None:
    seeds = torch.tensor([5, -(2**63), 2**63 - 1, 0])
    noise = seeded_noise(seeds, 64)
    for row, seed in enumerate(seeds):
        assert torch.equal(seeded_noise(seed.view(1), 64)[0], noise[row])
    assert torch.equal(seeded_noise(seeds, 32), noise[:, :32])


def test_noise_is_uniform_and_independent() -> None:
    noise = seeded_noise(torch.arange(20_000), 64).double()
    assert noise.min() >= 0
    assert noise.max() < 1
    # 1.28 million draws: the standard error of a tenth's share is 0.00027, of a correlation 0.007.
    shares = torch.histc(noise, bins=10, min=0, max=1) / noise.numel()
    assert (shares - 0.1).abs().max() < 0.0015
    correlation = torch.corrcoef(noise.T) - torch.eye(64)
    assert correlation.abs().max() < 0.04
    neighbours = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert neighbours.abs() < 0.005


def test_noise_follows_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as published with the algorithm's reference code."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    noise = seeded_noise(torch.tensor([1234567]), 3)[0]
    assert noise.tolist() == [(value >> 40) * 2.0**-24 for value in published]
