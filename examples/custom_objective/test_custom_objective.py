"""Promise: an objective defined outside the package runs through the same interface as the presets."""

import pickle
import sys
from pathlib import Path

import pytest
import torch

from megarl.errors import InputError
from megarl.objectives import TokenBatch, make_objective

sys.path.insert(0, str(Path(__file__).parent))
SPEC = {"name": "clipped_median:CLIPPED_MEDIAN", "scale": 0.5, "aggregation": "seq_mean_token_mean"}


def batch() -> TokenBatch:
    groups = [[0.0, 1.0, 9.0], [0.0, 1.0, 2.0, 4.0], [0.5, 0.5]]
    return TokenBatch.from_lists(
        [{"responses": [{"reward": r, "logp": [-0.5, -0.7], "old_logp": [-0.6, -0.7]} for r in group]} for group in groups],
        dtype=torch.float64,
    )


def test_it_runs_through_the_interface():
    objective, data = make_objective(SPEC), batch()
    prepared = objective.prepare(data)
    want = [-0.5, 0.0, 4.0, -0.75, -0.25, 0.25, 1.25, 0.0, 0.0]
    assert prepared.advantages[::2].tolist() == want
    update, logp = objective.begin_update(prepared), data.logp.clone().requires_grad_()
    for part in (torch.arange(5), torch.arange(5, 18)):
        objective.loss(update, part, logp[part]).loss.backward()
    ratio = torch.tensor([0.1, 0.0], dtype=torch.float64).exp().repeat(9)
    assert torch.allclose(logp.grad, -ratio * prepared.advantages / 18)
    assert not update.active[-1] and not objective.couples_groups


def test_its_parameters_are_checked_and_it_travels():
    with pytest.raises(InputError, match="scale"):
        make_objective({**SPEC, "scale": 0})
    with pytest.raises(InputError, match="did you mean `scale`"):
        make_objective({"name": SPEC["name"], "scael": 1})
    again = pickle.loads(pickle.dumps(make_objective(SPEC)))
    assert again.parameters["scale"] == 0.5 and again.name == "clipped_median"
