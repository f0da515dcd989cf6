"""Reinforcement learning from verifiable rewards: the loop."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.load import Loaded
from megarl.config.recipe import Recipe
from megarl.errors import RunFailed
from megarl.loop.evaluate import evaluate
from megarl.loop.policy_update import update_policy
from megarl.loop.rollouts import JudgedRollouts
from megarl.loop.run import Run
from megarl.observe import report
from megarl.tasks.prompts import Prompt
from megarl.training.optimizer import learning_rate


def run(loaded: Loaded[Recipe], resume: bool) -> int:
    """`megarl train`: 0 when all steps are done, 128 + the signal's number when the run was told to stop.

    Raises RunFailed when an engine or a rank fails; what was saved before stays and can be resumed.
    """
    try:
        with Run(loaded, resume) as training:
            train(training)
            return finish(training)
    except RunFailed as error:
        raise RunFailed(f"{error}. `--resume` goes on from the last checkpoint in {loaded.recipe.output}, if there is one.") from error


def train(run: Run) -> None:
    recipe, ledger = run.recipe, run.ledger
    if run.step == 0 and recipe.evaluation.every:
        with ledger.phase("evaluate"):
            metrics = evaluate(run)
        run.record(metrics | ledger.close_step())
    for step in run.remaining_steps():
        prompts = run.inputs.stream.take(recipe.rollout.prompts_per_step)
        parts, updates = [], []
        for part in generate_and_judge(run, prompts, step):
            with ledger.phase("train"):
                updates += update_policy(run, part, step, minibatches=1 if recipe.rollout.overlap_training else recipe.training.minibatches)
            parts.append(part)
        with ledger.phase("sync"):
            run.sync_weights(version=step)
        run.step = step
        rollouts = JudgedRollouts.joined(parts)
        metrics = rollouts.metrics() | policy_metrics(run, updates)
        run.entropy = metrics["policy/entropy"]
        if recipe.evaluation.every and (step % recipe.evaluation.every == 0 or step == recipe.training.steps):
            with ledger.phase("evaluate"):
                metrics |= evaluate(run)
        if run.checkpoint_due():
            with ledger.phase("checkpoint"):
                run.save_checkpoint()
        run.record(metrics | times(rollouts, ledger.close_step()), rollouts)


def generate_and_judge(run: Run, prompts: list[Prompt], step: int) -> Iterator[JudgedRollouts]:
    """The step's rollouts in one part; with `overlap_training` one part per mini-batch, while the engines work on the next."""
    recipe, ledger = run.recipe, run.ledger
    with ledger.phase("generate"):
        sampling = run.inputs.sampling(recipe.rollout.temperature)
        stream = run.fleet.stream(prompts, recipe.rollout.responses_per_prompt, sampling, step=step, seed=recipe.seed)
    done: dict[int, list] = {}
    size = len(prompts) // (recipe.training.minibatches if recipe.rollout.overlap_training else 1)
    for first in range(0, len(prompts), size):
        chosen = range(first, first + size)
        with ledger.phase("generate"):
            while not all(index in done for index in chosen):
                index, responses = next(stream)
                done[index] = responses
        with ledger.phase("verify"):
            part = run.inputs.judge(prompts[first : first + size], [response for index in chosen for response in done.pop(index)], first)
        yield part


def policy_metrics(run: Run, updates: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """The step's updates: sums over counts of all their tokens; loss and gradient norm as means over the updates.

    Names without a group of their own get `policy/`.
    """
    sums: dict[str, tuple[float, float]] = {}
    for update in updates:
        for name, (total, count) in update.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    metrics = {name if "/" in name else f"policy/{name}": total / count for name, (total, count) in sums.items() if count}
    # Without a clipped branch nothing was clipped.
    metrics.setdefault("policy/clip_fraction", 0.0)
    optimizer = run.recipe.training.optimizer
    return metrics | {"policy/learning_rate": learning_rate(optimizer, run.step, run.recipe.training.steps), "policy/version": run.step}


def times(rollouts: JudgedRollouts, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, and tokens per second of the phases that make and use tokens."""
    generated = rollouts.tokens
    trained = generated + sum(len(prompt.token_ids) for prompt in rollouts.prompts) * rollouts.n
    rates = {
        "throughput/generated_tokens_per_second": (generated, seconds.get("time/generate", 0.0)),
        "throughput/trained_tokens_per_second": (trained, seconds.get("time/train", 0.0)),
    }
    return seconds | {name: tokens / spent for name, (tokens, spent) in rates.items() if spent > 0}


def finish(run: Run) -> int:
    """The end of a run that was not cut off: checkpoint, model, report, summary. Returns the exit code."""
    complete = run.step == run.recipe.training.steps
    if complete:
        run.trainer.export(str((run.folder.path / "model").resolve()))
    if not run.folder.checkpoint(run.step).exists():
        run.save_checkpoint()
    report.render(run.folder.path)
    run.progress.summary(run.folder)
    return 0 if complete else run.stop.exit_code
