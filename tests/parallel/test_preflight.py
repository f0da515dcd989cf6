"""`megarl preflight`: a right layout passes, a fault in the layout's arithmetic or a layout that does not fit is named."""

import functools
import json

import pytest

from megarl.planning import preflight
from tests.parallel.faults import plant
from tests.system.conftest import megarl_here

pytestmark = pytest.mark.system

BIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
MOE = BIG | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a model of which there is no more than the config.json."""

    def write(layout, config=BIG, **training):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        text = {
            "output": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": "train.jsonl"},
            "verifier": {"name": "countdown"},
            "objective": {"name": "grpo", "kl": {"coef": 0.01}},
            "training": {"steps": 1, "layout": layout, **training},
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(text))
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.parametrize(
    "layout, changes, training",
    [
        (
            {"tensor": 8, "sequence_parallel": True, "pipeline": 4, "virtual_pipeline": 4, "data": 16},
            [],
            {"packing": True, "recompute": "full"},
        ),
        ({"context": 2, "data": 2}, ["objective={name: lpo}", "training.listwise_scalars=prepass"], {"packing": True}),
    ],
)
def test_a_production_layout_passes(recipe, layout, changes, training):
    said = megarl_here("preflight", recipe(layout, **training), *(x for change in changes for x in ("--set", change))).stdout
    assert "the layout does not change the result" in said and "hidden 5120 -> 64" in said and "DIFFERS" not in said
    assert ("reference" in said) == (not changes)


def test_one_process_is_not_compared_with_itself(recipe):
    assert "nothing to be compared with" in megarl_here("preflight", recipe({})).stdout
    assert "--ranks 1" in megarl_here("preflight", recipe({"data": 2}), "--ranks", "1", check=2).stderr


def test_numbers_far_from_1_are_compared_by_their_size(recipe):
    changes = ["rollout.temperature=0.01", "objective={name: rloo, kl: {coef: 1000}}"]
    said = megarl_here("preflight", recipe({"tensor": 2}), *(x for change in changes for x in ("--set", change))).stdout
    assert "the layout does not change the result" in said


def test_without_a_gradient_there_is_no_verdict(recipe):
    done = megarl_here("preflight", recipe({"data": 2}), "--set", "objective={name: lpo, clip_low: 0, clip_high: 0}", check=1)
    assert "cannot be judged" in done.stderr and "changes the result" not in done.stderr


@pytest.mark.parametrize("objective, said", [("{name: grpo, clip_hi: 1}", "`clip_hi`"), ("{name: ppo}", "value model")])
def test_an_objective_that_cannot_be_made_is_refused_with_its_place(recipe, objective, said):
    done = megarl_here("preflight", recipe({"data": 2}), "--set", f"objective={objective}", check=2)
    assert "--set: objective" in done.stderr and said in done.stderr and done.stderr.count("\n") == 1


def test_experts_pass(recipe):
    said = megarl_here("preflight", recipe({"data": 4, "expert": 4}, MOE), "--ranks", "4").stdout
    assert "experts 128 -> 8" in said and "layout: as in the recipe" in said


def with_fault(fault, job, groups):
    plant(fault if job.config.layout.world_size > 1 else None)
    return preflight.trial_on_rank(job, groups)  # the original: only the process that starts the ranks sees the patch


@pytest.mark.parametrize("fault", ["norm_gradients_not_summed_under_sequence_parallelism", "gradients_averaged_over_data_ranks"])
def test_a_layout_that_changes_the_result_is_found(recipe, monkeypatch, fault):
    monkeypatch.setattr(preflight, "trial_on_rank", functools.partial(with_fault, fault))
    layout = {"tensor": 2, "sequence_parallel": True, "data": 2}
    done = megarl_here("preflight", recipe(layout), check=1)
    assert "DIFFERS" in done.stdout and "changes the result" in done.stderr


@pytest.mark.parametrize(
    "layout, named",
    [
        ({"tensor": 16}, "key-value heads"),
        ({"pipeline": 3}, "layers"),
        ({"expert": 2, "data": 2}, "dense model"),
        ({"tensor": 0}, "tensor"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(recipe, layout, named):
    done = megarl_here("preflight", recipe(layout), check=2)
    assert named in done.stderr and done.stderr.count("\n") == 1
