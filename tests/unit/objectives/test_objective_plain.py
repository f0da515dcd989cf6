"""Promise: the objectives are the losses that one would write down, and the benchmark compares equals."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "objectives" / "run.py"
spec = importlib.util.spec_from_file_location("objectives_benchmark", FILE)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

BATCH = benchmark.make_batch(3000, longest=64)


@pytest.mark.parametrize("family", benchmark.FAMILIES)
def test_same_loss_and_gradient_as_the_plain_formulation(family):
    """`compare` stops if they differ."""
    row = benchmark.compare(family, BATCH, rounds=1)
    assert row["ms"] > 0 and row["mib"] > 0


def test_same_gae_as_the_loop_over_positions():
    assert benchmark.compare_gae(BATCH, rounds=1)["ms"] > 0
