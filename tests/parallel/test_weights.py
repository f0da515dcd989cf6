"""Weights go in and come out under every layout as they are in the folder, and checkpoints load under another layout."""

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.training.local_ranks import run_ranks
from tests.parallel.parity import Case, exported, losses_of_updates, losses_while_saving

pytestmark = pytest.mark.system

SHARDED, OVERLAPPED = {"distributed": True}, {"distributed": True, "overlap": True}
TP2_SP = {"tensor": 2, "sequence_parallel": True}


def case(folder, layout, **others):
    return Case(model=str(folder), layout=layout, objective={"name": "grpo"}, **others).config()


def run_on(config, function, *arguments):
    return run_ranks(config.layout.world_size, function, config, *arguments)


@pytest.mark.parametrize(
    "model, layout",
    [
        ("qwen3_tied", {"tensor": 2}),
        ("qwen3_tied", {"pipeline": 2}),
        ("qwen3_tied", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3_tied", {"context": 2}),
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}),
        ("llama_untied", {"pipeline": 2, "virtual_pipeline": 2}),
        ("llama_untied", {"tensor": 2, "data": 2}),
        ("experts", {}),
        ("experts", {"data": 2, "expert": 2}),
        ("experts", {"data": 4, "expert": 2}),
        ("experts", {"data": 2, "expert_tensor": 2}),
        ("experts", {"data": 4, "expert": 2, "expert_tensor": 2}),
        ("experts", TP2_SP | {"data": 2, "expert": 4}),
        ("experts", {"pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert": 2}),
        ("experts_unnormalized", {"pipeline": 2, "data": 2, "expert": 2}),
    ],
)
def test_exported_weights_are_those_of_the_folder(tiny_models, model, layout):
    got = run_on(case(tiny_models[model], layout), exported)[0]
    want = load_file(tiny_models[model] / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], tensor.numpy()) for name, tensor in want.items())


def test_weights_exported_after_an_overlapped_update_are_the_new_ones(tiny_models):
    plain = case(tiny_models["qwen3_tied"], {"data": 2})
    overlapped = case(tiny_models["qwen3_tied"], {"data": 2}, optimizer=OVERLAPPED)
    want = run_on(plain, exported, 1)[0]
    got, stale = run_on(overlapped, exported, 1)[0], run_on(overlapped, exported, 1, "weights_exported_before_they_are_gathered")[0]
    largest = lambda weights: max(np.abs(weights[name] - want[name]).max() for name in want)
    assert largest(got) < 1e-6 < 1e-4 < largest(stale)


@pytest.mark.parametrize(
    "model, before, after",
    [
        ("qwen3_tied", ({"tensor": 2, "data": 2}, SHARDED), [({"pipeline": 2}, SHARDED), ({}, SHARDED)]),
        ("qwen3_tied", ({"tensor": 2, "data": 2}, {}), [({"pipeline": 2}, {}), ({}, {})]),
        ("qwen3_tied", ({"pipeline": 2, "virtual_pipeline": 2}, OVERLAPPED), [({"context": 2}, OVERLAPPED), ({}, SHARDED)]),
        ("llama_untied", ({}, SHARDED), [({"pipeline": 2, "virtual_pipeline": 2}, SHARDED)]),
        ("experts", ({"data": 2, "expert": 2}, SHARDED), [({}, SHARDED), (TP2_SP | {"expert": 2}, SHARDED)]),
        ("experts", ({"pipeline": 2, "data": 2, "expert": 2}, {}), [({}, {}), ({"data": 2}, {})]),
    ],
    ids=["TP2·DP2 sharded", "TP2·DP2", "PP2·VPP2 overlapped", "one to PP2·VPP2", "EP2 sharded", "PP2·EP2"],
)
def test_a_checkpoint_loads_under_another_layout(tiny_models, tmp_path, model, before, after):
    config = lambda layout, optimizer: case(tiny_models[model], layout, optimizer=optimizer)
    total = lambda parts: np.sum(parts, 0)
    run_on(config(*before), losses_of_updates, [0, 1], None, str(tmp_path))
    one = after[-1] if not after[-1][0] else ({}, {"distributed": before[1].get("distributed", False)})
    want = total(run_on(config(*one), losses_of_updates, [0, 1, 2, 3, 4]))[2:]
    assert np.ptp(want) > 1e-3
    for layout, optimizer in after:
        got = total(run_on(config(layout, optimizer), losses_of_updates, [2, 3, 4], str(tmp_path)))
        assert got == pytest.approx(want, abs=1e-5)


def test_a_checkpoint_written_while_training_goes_on_holds_the_state_at_its_beginning(tiny_models, tmp_path):
    config = case(tiny_models["qwen3_tied"], {"data": 2}, optimizer=SHARDED)
    want = np.sum(run_on(config, losses_while_saving, str(tmp_path)), 0)[2:]
    got = np.sum(run_on(config, losses_of_updates, [2, 3, 4], str(tmp_path)), 0)
    assert got == pytest.approx(want, abs=1e-6)
