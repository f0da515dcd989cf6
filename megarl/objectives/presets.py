"""Presets: a name for a composition of parts and for the defaults of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.objectives import advantages
from megarl.objectives.advantages import Estimator
from megarl.objectives.parameters import Check, number, word
from megarl.objectives.surrogates import CAPPED, CISPO, CLIPPED, LISTWISE, TARGET, Surrogate


@dataclass(frozen=True)
class Composition:
    """An objective as parts: how rewards become advantages, and how advantages become a token loss."""

    name: str
    advantage: Estimator
    surrogate: Surrogate = CLIPPED
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that it takes, with their defaults."""
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Checks of parameters that are its own or narrower than the common ones."""
    vector_rewards: bool = False
    """Rewards are matrices."""
    token_rewards: bool = False
    """Rewards lie on tokens: KL in the reward is subtracted token by token."""
    reads_reward: bool = True
    """False: only `correct` is looked at, so that a shaped reward would be without effect and is refused."""
    value_model: bool = False
    batch_statistics: bool = False
    """The advantages depend on statistics over several groups, whatever the parameters."""


COMMON: dict[str, Any] = {
    "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "token", "aggregation": "token_mean", "norm_length": None, "kl": None,
    "entropy_coef": 0.0, "top_entropy_fraction": None, "overlong": None, "correction": None, "drop_degenerate_groups": False,
}  # fmt: skip
GROUP = {**COMMON, "std": "population", "std_eps": 1e-6, "equal_tol": 1e-8}
FEW = {"kl": None, "entropy_coef": 0.0, "overlong": None, "drop_degenerate_groups": False, "equal_tol": 1e-8}
VALUE = {
    **COMMON, "equal_tol": 1e-8, "gamma": 1.0, "lambda": 0.95, "lambda_critic": None, "bootstrap_truncated": False, "whiten": False,
    "value_clip": 0.2, "value_coef": 0.5,
}  # fmt: skip
VECTOR = {**GROUP, "dual_clip": 3.0, "num_weights": 100, "alpha": 1.0, "sampler": "iid"}


def _without(parameters: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in names}


_COMPOSITIONS = (
    Composition("grpo", advantages.group_centred, parameters={**GROUP, "aggregation": "seq_mean_token_mean"}),
    Composition("dr_grpo", advantages.group_centred, parameters={**GROUP, "std": "none", "aggregation": "seq_mean_token_sum_norm"}),
    Composition("dapo", advantages.group_centred, parameters={**GROUP, "clip_high": 0.28, "drop_degenerate_groups": True}),
    Composition("rloo", advantages.leave_one_out,
                parameters={**GROUP, "std": "none", "ratio": "none", "aggregation": "seq_mean_token_sum"}),
    Composition("reinforce_pp", advantages.whitened_returns, token_rewards=True, batch_statistics=True,
                parameters={**COMMON, "equal_tol": 1e-8, "gamma": 1.0}),
    Composition("reinforce_pp_baseline", advantages.batch_scaled, batch_statistics=True, parameters=GROUP),
    Composition("maxrl", advantages.mean_normalized, parameters={**COMMON, "equal_tol": 1e-8}),
    Composition("gspo", advantages.group_centred,
                parameters={**GROUP, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}),
    Composition("cispo", advantages.group_centred, CISPO,
                parameters={**_without(GROUP, "dual_clip"), "clip_low": None, "clip_high": 0.28}),
    Composition("raft", advantages.correct_only, reads_reward=False, parameters={**COMMON, "ratio": "none"}),
    Composition("raft_pp", advantages.correct_only, reads_reward=False, parameters=COMMON),
    Composition("reinforce_rej", advantages.plain_reward, parameters={**COMMON, "drop_degenerate_groups": True}),
    Composition("psr", advantages.correct_only, reads_reward=False, parameters=COMMON),
    Composition("nsr", advantages.incorrect_only, reads_reward=False, parameters=COMMON),
    Composition("w_reinforce", advantages.weighted_signs, reads_reward=False, parameters={**COMMON, "positive_weight": 0.1}),
    Composition("wapo", advantages.winners, CAPPED, checks={"ratio": word("token", "none")},
                parameters={**FEW, "std": "none", "std_eps": 1e-6, "ratio": "token", "clip_high": 9.0, "norm_length": None,
                            "normalize": "norm_length"}),
    Composition("vpo", advantages.set_centred, vector_rewards=True, parameters=VECTOR),
    Composition("lpo", advantages.listwise_policy, LISTWISE, checks={"alpha": number(0, 1, above=True, below=True)},
                parameters={**FEW, "divergence": "forward_kl", "alpha": 0.5, "tau": "group_std", "clip_mode": "hard", "clip_low": 0.2,
                            "clip_high": 0.2, "pointwise": False}),
    Composition("tpo", advantages.target_policy, TARGET, parameters={**FEW, "eta": 1.0}),
    Composition("ppo", advantages.value_based, token_rewards=True, value_model=True, parameters=VALUE),
    Composition("vapo", advantages.value_based, token_rewards=True, value_model=True, checks={"alpha": number(0, above=True, null=True)},
                parameters={**VALUE, "clip_high": 0.28, "alpha": 0.05, "nll_coef": 0.1, "lambda_critic": 1.0, "value_clip": None}),
)  # fmt: skip

PRESETS: dict[str, Composition] = {composition.name: composition for composition in _COMPOSITIONS}
