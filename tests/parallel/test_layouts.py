"""Through Ray, as in a run: two layouts against one process. The matrix of layouts is in test_parity.py."""

import pytest

from megarl.objectives import make_objective
from megarl.training.rank import UpdateSettings
from megarl.training.trainer import Trainer
from tests.parallel.parity import RATE, Case, Result, differences, rollouts, token_kinds
from tests.parallel.test_parity import FP32

pytestmark = pytest.mark.system


def one_update(model, layout, packing=False):
    case = Case(model=str(model), layout=layout, objective={"name": "grpo"}, packing=packing)
    trainer = Trainer.start(case.config(), max_tokens=case.max_tokens)
    try:
        sequences, batch = rollouts()
        objective = make_objective(case.objective)
        update = objective.begin_update(objective.prepare(batch))
        plan = trainer.plan(sequences, update.responses[update.active].tolist())
        settings = UpdateSettings(RATE, mismatch_tokens=batch.num_tokens, token_kinds=True)
        metrics = trainer.finish_update(trainer.begin_update(sequences, update, plan, settings))
        norm, ranks = metrics["grad_norm"]
        logp, _ = trainer.logprobs(sequences)
        return Result(metrics["loss"][0], norm / ranks, metrics["clip_fraction"][0], trainer.gradients(), logp, token_kinds(metrics))
    finally:
        trainer.shutdown()


@pytest.fixture(scope="module")
def one_process(cluster, tiny_models):
    return one_update(tiny_models["qwen3_tied"], {})


@pytest.mark.parametrize("layout, packing", [({"tensor": 2, "sequence_parallel": True}, False), ({"pipeline": 2, "context": 2}, True)])
def test_layouts_agree_with_one_process(one_process, tiny_models, layout, packing):
    found = differences(one_update(tiny_models["qwen3_tied"], layout, packing), one_process)
    assert all(found[name] <= limit for name, limit in FP32.items()), found
