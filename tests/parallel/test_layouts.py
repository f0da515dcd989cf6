"""A layout never changes the result: loss, gradient norm and gradients of one update, against one process and against Hugging Face."""

import numpy as np
import pytest
import torch

from megarl.config.recipe import Layout, Optimizer, Training
from megarl.objectives import TokenBatch, make_objective
from megarl.training.rank import UpdateSettings
from megarl.training.sequences import Sequences
from megarl.training.trainer import Trainer, rank_config

pytestmark = pytest.mark.system

GRPO = {"name": "grpo"}
LAYOUTS = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
}
TOLERANCE = 1e-5


def rollouts(groups=6, n=4, seed=0):
    """Ragged prompts and responses, one group without signal."""
    rng = np.random.default_rng(seed)
    prompts, responses, rewards = [], [], []
    for group in range(groups):
        prompt = rng.integers(2, 125, rng.integers(1, 9)).tolist()
        for _ in range(n):
            prompts.append(prompt)
            responses.append(rng.integers(2, 125, rng.integers(1, 14)).tolist())
            rewards.append(1.0 if group == 2 else float(rng.integers(0, 2)))
    sequences = Sequences.of(prompts, responses)
    tokens = int(sequences.response_starts[-1])
    # Old log-probs near those of a uniform policy, so that some ratios are clipped.
    logp = torch.from_numpy(rng.normal(-np.log(125), 0.3, tokens)).float()
    batch = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(len(prompts)), torch.from_numpy(sequences.response_lengths)),
        mask=torch.ones(tokens, dtype=torch.bool),
        group=torch.arange(len(prompts)) // n,
        reward=torch.tensor(rewards),
        old_logp=logp,
        rollout_logp=logp,
    )
    return sequences, batch


def one_update(model, layout, *, objective=GRPO, max_tokens=96, skip=True, clip_grad=0.0, prepass=False):
    """(metrics, gradients by name, exported manifest names) of the first update."""
    training = Training(steps=1, layout=Layout(**layout), optimizer=Optimizer(learning_rate=1e-3, clip_grad=clip_grad), threads_per_rank=1)
    config = rank_config(model_path=str(model), pad_vocab_to=32, training=training, objective=objective, temperature=0.8, seed=0)
    trainer = Trainer.start(config, max_tokens=max_tokens)
    try:
        sequences, batch = rollouts()
        part = make_objective(objective)
        update = part.begin_update(part.prepare(batch))
        rows = update.responses[update.active] if skip else update.responses
        units = None
        if part.coupling == "group" and not prepass:
            units = [[row for row in rows.tolist() if batch.group[row] == g] for g in range(batch.num_groups)]
        plan = trainer.plan(sequences, rows.tolist(), units)
        settings = UpdateSettings(1e-3, prepass=prepass, mismatch_tokens=batch.num_tokens, token_kinds=True)
        metrics = trainer.finish_update(trainer.begin_update(sequences, update, plan, settings))
        return metrics, trainer.gradients(), trainer.logprobs(sequences)[0]
    finally:
        trainer.shutdown()


@pytest.fixture(scope="module")
def one_process(cluster, tiny_models):
    return {name: one_update(path, {}) for name, path in tiny_models.items()}


def agree(got, want):
    assert got[0]["loss"][0] == pytest.approx(want[0]["loss"][0], abs=TOLERANCE)
    assert got[0]["grad_norm"][0] / got[0]["grad_norm"][1] == pytest.approx(
        want[0]["grad_norm"][0] / want[0]["grad_norm"][1], rel=TOLERANCE
    )
    assert got[0]["clip_fraction"][0] == want[0]["clip_fraction"][0] > 0  # clipped tokens; without signal there are none
    assert got[1].keys() == want[1].keys()
    largest = max(np.abs(gradient).max() for gradient in want[1].values())
    for name, gradient in want[1].items():
        assert np.abs(got[1][name] - gradient).max() <= TOLERANCE * largest, name
    for name in (name for name in want[0] if name.startswith("token_kind/")):
        assert got[0][name] == pytest.approx(want[0][name], rel=1e-4, abs=1e-6), name
    # The log-probs after the update: the optimizer did the same on every rank.
    assert np.abs(got[2] - want[2]).max() < 1e-4


@pytest.mark.parametrize(
    "name, layout", [*(("qwen3_tied", layout) for layout in LAYOUTS), ("llama_untied", "TP2"), ("llama_untied", "PP2")]
)
def test_layouts_agree_with_one_process(one_process, tiny_models, name, layout):
    agree(one_update(tiny_models[name], LAYOUTS[layout]), one_process[name])


def test_qwen2_with_its_biases_and_tied_embeddings_over_two_stages(one_process, tiny_models):
    agree(one_update(tiny_models["qwen2_tied"], {"pipeline": 2}), one_process["qwen2_tied"])


@pytest.mark.parametrize("how", [{"max_tokens": 4096}, {"max_tokens": 16}, {"skip": False}])
def test_micro_batches_and_skipping_change_nothing(one_process, tiny_models, how):
    agree(one_update(tiny_models["qwen3_untied"], {}, **how), one_process["qwen3_untied"])


@pytest.mark.parametrize("objective, layout", [({"name": "gspo"}, "TP2"), ({"name": "lpo"}, "DP2")])
def test_objectives_that_couple_tokens(cluster, tiny_models, objective, layout):
    path = tiny_models["qwen3_tied"]
    agree(one_update(path, LAYOUTS[layout], objective=objective), one_update(path, {}, objective=objective))


@pytest.mark.parametrize("objective, layout", [({"name": "lpo"}, {"data": 2}), ({"name": "tpo"}, {"tensor": 2, "pipeline": 2})])
def test_a_prepass_gives_what_groups_kept_whole_give(cluster, tiny_models, objective, layout):
    path = tiny_models["llama_untied"]
    want = one_update(path, {}, objective=objective)
    # Micro-batches of two sequences: every group is split, over ranks too.
    agree(one_update(path, layout, objective=objective, max_tokens=40, prepass=True), want)


def test_one_process_agrees_with_hugging_face(one_process, tiny_models):
    from transformers import AutoModelForCausalLM

    sequences, batch = rollouts()
    objective = make_objective(GRPO)
    update = objective.begin_update(objective.prepare(batch))
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_untied"], dtype=torch.float32)
    parts = []
    for row in range(len(sequences)):
        ids = torch.from_numpy(sequences.tokens[sequences.starts[row] : sequences.starts[row + 1]])[None]
        prompt = int(sequences.prompt_lengths[row])
        logp = torch.log_softmax(model(ids).logits[0, prompt - 1 : -1] / 0.8, -1)
        parts.append(logp.gather(1, ids[0, prompt:, None])[:, 0])
    loss = objective.loss(update, torch.arange(batch.num_tokens), torch.cat(parts)).loss
    loss.backward()
    metrics, gradients, _ = one_process["qwen3_untied"]
    assert metrics["loss"][0] == pytest.approx(loss.item(), abs=TOLERANCE)
    want = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert want.keys() == gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in want.values())
    for name, gradient in want.items():
        assert np.abs(gradients[name] - gradient).max() <= TOLERANCE * largest, name
