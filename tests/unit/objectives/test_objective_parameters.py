"""Promise: a wrong objective or parameter is refused with its name and, where one is near, the right one."""

import math

import pytest
import torch
from objective_batches import batch_of, random_batch

from megarl.errors import InputError
from megarl.objectives import PRESETS, TokenBatch, make_objective


def spec(name, **parameters):
    return {"name": name, **({"norm_length": 8} if name in ("dr_grpo", "wapo") else {}), **parameters}


OUT_OF_RANGE = [
    *(("grpo", {name: bad}, name) for name, values in {
        "clip_low": (-0.1, True, "0.2", math.nan), "clip_high": (-1, math.inf, [1]), "dual_clip": (1, 0.5), "ratio": ("tokens", None, 1),
        "std": ("pop", None), "std_eps": (-1e-9, None), "equal_tol": (-1e-9,), "aggregation": ("mean",), "norm_length": (0, -3),
        "entropy_coef": (None, math.nan), "top_entropy_fraction": (0, 1.01, -0.2), "drop_degenerate_groups": (1, "yes", None),
        "kl": (0.1, "k1", []), "overlong": ("drop", 3), "correction": ("token_tis", 3),
    }.items() for bad in values),
    ("grpo", {"kl": {}}, "coef"), ("grpo", {"kl": {"coef": -1}}, "coef"), ("grpo", {"kl": {"coef": 1, "where": "here"}}, "where"),
    ("grpo", {"kl": {"coef": 1, "beta": 1}}, "beta"), ("grpo", {"overlong": {"max_length": 4}}, "cache"),
    ("grpo", {"overlong": {"cache": 4}}, "max_length"), ("grpo", {"overlong": {"max_length": 0, "cache": 0}}, "max_length"),
    ("grpo", {"overlong": {"max_length": 4, "cache": 5}}, "cache"), ("grpo", {"overlong": {"max_length": 4, "cache": -1}}, "cache"),
    ("grpo", {"overlong": {"max_length": 4, "cache": 1, "factor": -1}}, "factor"),
    ("grpo", {"correction": {"kind": "token_tis", "low": -1}}, "low"), ("grpo", {"correction": {"kind": "token_tis", "high": -1}}, "high"),
    ("grpo", {"correction": {"kind": "token_tis", "low": 2, "high": 1}}, "low"), ("grpo", {"correction": {"normalise": True}}, "normalise"),
    ("grpo", {"correction": {"normalize": 1}}, "normalize"),
    ("grpo", {"aggregation": "seq_mean_token_sum_norm"}, "norm_length"),
    ("ppo", {"gamma": 1.1}, "gamma"), ("ppo", {"lambda": -0.1}, "lambda"),
    ("ppo", {"lambda_critic": 2}, "lambda_critic"), ("ppo", {"value_clip": -0.1}, "value_clip"), ("ppo", {"value_coef": -1}, "value_coef"),
    ("vapo", {"nll_coef": -1}, "nll_coef"), ("vapo", {"alpha": 0}, "alpha"), ("w_reinforce", {"positive_weight": -1}, "positive_weight"),
    ("vpo", {"num_weights": 0}, "num_weights"), ("vpo", {"num_weights": 2.5}, "num_weights"), ("vpo", {"alpha": 0}, "alpha"),
    ("lpo", {"alpha": 1}, "alpha"), ("lpo", {"alpha": 0}, "alpha"), ("lpo", {"tau": -1}, "tau"), ("lpo", {"tau": None}, "tau"),
    ("lpo", {"divergence": "kl"}, "divergence"), ("lpo", {"clip_mode": "soft"}, "clip_mode"), ("lpo", {"pointwise": 1}, "pointwise"),
    ("tpo", {"eta": 0}, "eta"), ("wapo", {"ratio": "sequence"}, "ratio"), ("wapo", {"normalize": "tokens"}, "normalize"),
    ("reinforce_pp", {"gamma": 2}, "gamma"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "text"), OUT_OF_RANGE, ids=[f"{n}-{t}-{i}" for i, (n, _, t) in enumerate(OUT_OF_RANGE)])
def test_out_of_range(name, parameters, text):
    with pytest.raises(InputError, match=f"`{text}`"):
        make_objective(spec(name, **parameters))


IN_RANGE = [
    ("grpo", {"clip_low": None, "clip_high": 0, "kl": {"coef": 0}, "correction": {}, "overlong": {"max_length": 4, "cache": 4}}),
    ("raft", {"kl": {"coef": 0, "where": "reward"}, "overlong": "mask"}),
    ("lpo", {"clip_low": None, "clip_high": None, "tau": 3}), ("vapo", {"alpha": None, "lambda_critic": None, "value_clip": 0.2}),
    ("wapo", {"clip_high": None, "ratio": "none"}), ("grpo", {"entropy_coef": -0.1, "top_entropy_fraction": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), IN_RANGE)
def test_in_range(name, parameters):
    make_objective(spec(name, **parameters))


NOT_TAKEN = [
    ("cispo", "dual_clip", 3.0), ("maxrl", "std", "none"), ("raft", "equal_tol", 0.0), ("reinforce_pp", "std_eps", 0.0),
    ("grpo", "gamma", 1.0),
    ("lpo", "ratio", "token"), ("lpo", "aggregation", "token_mean"), ("tpo", "clip_low", 0.1), ("wapo", "clip_low", 0.1),
    ("wapo", "correction", None),
    ("tpo", "top_entropy_fraction", None), ("ppo", "nll_coef", 0.1), ("ppo", "std", "none"), ("grpo", "positive_weight", 0.1),
    ("psr", "std", "none"),
    ("reinforce_rej", "equal_tol", 0.0), ("gspo", "eta", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameter", "value"), NOT_TAKEN)
def test_parameters_that_a_preset_does_not_take(name, parameter, value):
    with pytest.raises(InputError, match=rf"`{name}` takes no parameter `{parameter}`"):
        make_objective(spec(name, **{parameter: value}))


def test_every_preset_takes_what_the_specification_lists():
    common = {"clip_low", "clip_high", "dual_clip", "ratio", "aggregation", "norm_length", "kl", "entropy_coef", "top_entropy_fraction",
              "overlong", "correction", "drop_degenerate_groups"}  # fmt: skip
    scaled = {"grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "gspo", "cispo", "vpo", "wapo"}
    for name, preset in PRESETS.items():
        takes = set(preset.parameters)
        assert ({"std", "std_eps"} <= takes) == (name in scaled), name
        assert ("equal_tol" in takes) == (name in scaled | {"reinforce_pp", "maxrl", "lpo", "tpo", "ppo", "vapo"}), name
        if name not in ("wapo", "lpo", "tpo"):
            assert common - takes == ({"dual_clip"} if name == "cispo" else set()), name


@pytest.mark.parametrize("name", ["raft", "raft_pp", "psr", "nsr", "w_reinforce"])
def test_shaped_rewards_are_refused_where_only_correctness_counts(name):
    with pytest.raises(InputError, match="`kl`"):
        make_objective({"name": name, "kl": {"coef": 0.1, "where": "reward"}})
    with pytest.raises(InputError, match="`overlong`"):
        make_objective({"name": name, "overlong": {"max_length": 4, "cache": 2}})


def test_the_nearest_name_is_suggested():
    for bad, near in (
        ({"name": "gspoo"}, "gspo"),
        ({"name": "grpo", "clip_hgh": 0.1}, "clip_high"),
        ({"name": "grpo", "ratio": "tokn"}, "token"),
    ):
        with pytest.raises(InputError, match=f"did you mean `?{near}"):
            make_objective(bad)


NEEDED = [
    ({"name": "ppo"}, "old_values", "values"), ({"name": "grpo", "kl": {"coef": 0.1}}, "ref_logp", "ref_logp"),
    ({"name": "dapo", "top_entropy_fraction": 0.2}, "entropy", "entropy"),
    ({"name": "vapo", "bootstrap_truncated": True}, "bootstrap_value", "bootstrap_value"),
    ({"name": "grpo", "correction": {"kind": "token_tis"}}, "rollout_logp", "old_logp"),
    ({"name": "rloo", "kl": {"coef": 0.1, "where": "reward"}}, "old_logp", "old_logp"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "field", "text"), NEEDED)
def test_what_is_needed_is_announced_and_its_absence_named(given, field, text):
    objective, batch = make_objective(given), random_batch(0)
    assert field in objective.needs
    lacking = {**vars(batch), field: None}
    lacking |= {"old_values": {"values": None}, "old_logp": {"logp": None}, "rollout_logp": {"old_logp": None, "logp": None}}.get(field, {})
    with pytest.raises(InputError, match=text):
        objective.prepare(TokenBatch(**lacking))
    assert make_objective({"name": "grpo"}).needs == frozenset()


def test_a_reward_of_the_wrong_kind_is_refused():
    with pytest.raises(InputError, match="reward"):
        make_objective({"name": "vpo"}).prepare(batch_of([[1.0, 0.0]]))
    with pytest.raises(InputError, match="reward"):
        make_objective({"name": "grpo"}).prepare(random_batch(0, vector=True))
    rows = TokenBatch.from_lists([{"responses": [{"reward": [[1.0, 0.0]], "logp": [-1.0]}, {"reward": [[1.0]], "logp": [-1.0]}]}])
    with pytest.raises(InputError, match="response 1"):
        make_objective({"name": "vpo"}).prepare(rows)


@pytest.mark.parametrize("path", ["no_such_package:thing", "math:no_such_thing", "math:pi"])
def test_an_import_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(InputError, match=path):
        make_objective({"name": path})


def test_specification_is_not_changed():
    given = {"name": "grpo", "kl": {"coef": 0.1}}
    make_objective(given)
    assert given == {"name": "grpo", "kl": {"coef": 0.1}}


def test_group_ids_default_to_numbers():
    batch = TokenBatch(torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), torch.zeros(2))
    assert batch.group_ids == ["0", "1"] and batch.num_groups == 2


def broken_factory(parameters):
    raise KeyError(parameters["width"])


def test_a_factory_of_ones_own_that_fails_is_named():
    with pytest.raises(InputError, match=f"{__name__}:broken_factory` cannot be made .*KeyError"):
        make_objective({"name": f"{__name__}:broken_factory", "width": 3})
