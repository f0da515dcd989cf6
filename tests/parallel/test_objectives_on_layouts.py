"""Every objective that needs no value model has the same gradient on every layout, with ragged groups and dropped responses."""

import numpy as np
import pytest

from megarl.objectives import PRESETS
from megarl.training.local_ranks import run_ranks
from tests.parallel.parity import Case, gradients_of_objectives

pytestmark = pytest.mark.system

PLAIN = [
    {"name": name} | ({"norm_length": 14} if name in ("dr_grpo", "wapo") else {}) for name, part in PRESETS.items() if not part.value_model
]
SPECS = [
    *PLAIN,
    {"name": "grpo", "overlong": "mask", "dual_clip": 1.5, "correction": {"kind": "sequence_tis", "high": 1.3}},
    {"name": "dapo", "top_entropy_fraction": 0.4, "drop_degenerate_groups": True},
    {"name": "gspo", "overlong": "mask", "clip_low": 0.1, "clip_high": 0.1, "aggregation": "seq_mean_token_sum"},
    {"name": "cispo", "ratio": "sequence", "clip_low": 0.1, "entropy_coef": 0.01},
    {"name": "lpo", "divergence": "reverse_kl", "tau": "batch_std", "clip_mode": "pessimistic", "overlong": "mask"},
    {"name": "tpo", "overlong": "mask", "entropy_coef": 0.02, "drop_degenerate_groups": True},
]
LAYOUTS = {
    "TP2·PP2": {"tensor": 2, "pipeline": 2},
    "DP2": {"data": 2},
    "CP2": {"context": 2},
    "PP2·VPP2, packed": {"pipeline": 2, "virtual_pipeline": 2},
    "CP2, packed": {"context": 2},
}


def gradients(folder, layout, packing=False):
    config = Case(model=str(folder), layout=layout, objective={"name": "grpo"}, packing=packing).config()
    parts = run_ranks(config.layout.world_size, gradients_of_objectives, config, SPECS)
    return [(sum(part[i][0] for part in parts), parts[0][i][1]) for i in range(len(SPECS))]


@pytest.fixture(scope="module")
def one_process(tiny_models):
    return gradients(tiny_models["qwen3_tied"], {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_objective_has_the_gradient_of_one_process(tiny_models, one_process, layout):
    got = gradients(tiny_models["qwen3_tied"], LAYOUTS[layout], packing="packed" in layout)
    for spec, (loss, found), (want_loss, want) in zip(SPECS, got, one_process, strict=True):
        largest = max(np.abs(gradient).max() for gradient in want.values())
        assert largest > 0, spec
        assert loss == pytest.approx(want_loss, abs=1e-5), spec
        for name, gradient in want.items():
            assert np.abs(found[name] - gradient).max() <= 1e-5 * largest, (spec, name)
