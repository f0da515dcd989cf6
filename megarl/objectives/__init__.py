"""Every objective in one room: rewards and log-probs in, per-token coefficients and one scalar loss out. Torch only.

objective = make_objective({"name": "grpo", "clip_high": 0.28})
prepared = objective.prepare(batch)                    # whole rollout batch, once, detached
update = objective.begin_update(prepared, responses)   # one mini-batch: its denominators
out = objective.loss(update, token_index, logp)        # any part of it; the parts' losses add up to the update's loss
"""

from megarl.objectives.batch import TokenBatch
from megarl.objectives.objective import LossOutput, Objective, Prepared, Scalars, SequenceSums, Update, make_objective
from megarl.objectives.presets import PRESETS, Composition

__all__ = [
    "PRESETS",
    "Composition",
    "LossOutput",
    "Objective",
    "Prepared",
    "Scalars",
    "SequenceSums",
    "TokenBatch",
    "Update",
    "make_objective",
]
