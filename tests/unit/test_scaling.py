"""The arithmetic behind docs/scaling.md."""

import dataclasses

import pytest

from benchmarks.scaling import Model, Reading, ScalingBenchmark, count, derive
from models.mae import MAEConfig, build_mae
from pretrain.report import forward_gflops

ROUND = ScalingBenchmark(
    gpu_tflops=1000, utilisation=0.1, images_at_once=64, node_gbit_s=800, network_share=0.5, nvlink_gb_s=500, cores_per_gpu=10,
)  # fmt: skip
MODEL = Model("base", parameters=10**9, flops=1e11)
FAST = Reading(bytes_per_image=1e5, images_per_core_s=1e9)


def test_the_operations_of_a_step_are_counted_on_the_model_itself() -> None:
    counted, model = count("base"), build_mae(MAEConfig(name="base"))
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # The backward pass costs twice the forward one, but for the first layer, whose input needs no gradient.
    assert 2.9 < counted.flops / (forward_gflops(MAEConfig(name="base")) * 1e9) < 3.0


def test_a_step_waits_for_what_the_backward_pass_does_not_hide() -> None:
    step = derive(MODEL, FAST, 16, 16 * 64, ROUND)
    assert step.compute_s == pytest.approx(64 * 1e11 / 1e14)  # 64 ms, 42.7 of them backward
    assert step.all_reduce_s == pytest.approx(2 * 1 / 2 * 4e9 / 50e9)  # two nodes of 50 GB/s: 80 ms
    assert step.exposed_s == pytest.approx(0.08 - 0.064 * 2 / 3)
    assert step.seconds == pytest.approx(step.compute_s + step.exposed_s)
    assert step.wall == "compute"
    half = derive(MODEL, FAST, 16, 16 * 64, dataclasses.replace(ROUND, gradient_bytes=2))
    assert half.exposed_s == 0


def test_accumulated_micro_batches_hide_nothing_but_the_last() -> None:
    one, four = (derive(MODEL, FAST, 16, 16 * 64 * count, ROUND) for count in (1, 4))
    assert four.compute_s == pytest.approx(4 * one.compute_s)
    assert four.exposed_s == pytest.approx(one.exposed_s)


def test_one_node_needs_no_network() -> None:
    step = derive(MODEL, FAST, 8, 8 * 64, ROUND)
    assert step.all_reduce_s == pytest.approx(2 * 7 / 8 * 4e9 / 500e9)
    assert step.exposed_s == 0


def test_slow_readers_are_the_wall() -> None:
    step = derive(MODEL, Reading(1e5, images_per_core_s=40), 8, 8 * 64, ROUND)
    assert step.seconds == pytest.approx(64 / (10 * 40))
    assert step.wall == "reading"
    network = derive(dataclasses.replace(MODEL, flops=1e9), FAST, 16, 16 * 64, ROUND)
    assert network.wall == "network"
