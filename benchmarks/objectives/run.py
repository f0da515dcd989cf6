"""Time and peak memory of the objectives' losses against plain autograd formulations, side by side in one run.

    python benchmarks/objectives/run.py [--tokens 65536] [--rounds 20] [--json]

Both sides get the same advantages; loss and backward pass are measured on float32 log-probs. Their losses and gradients are compared first.
Memory is what the operations allocate at the same time, beyond the inputs. Ratios below 1: this package needs less.
"""

from __future__ import annotations

# ruff: noqa: E402
import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler is chatty, and reads this when it is imported
import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
import plain_losses as plain

from megarl.objectives import TokenBatch, make_objective
from megarl.objectives.gae import generalized_advantages

FAMILIES: dict[str, tuple[dict, Callable]] = {
    "grpo": ({"name": "grpo"}, plain.grpo),
    "dapo + kl": ({"name": "dapo", "drop_degenerate_groups": False, "kl": {"coef": 0.04}}, plain.dapo_kl),
    "gspo": ({"name": "gspo"}, plain.gspo),
    "cispo": ({"name": "cispo"}, plain.cispo),
    "rloo": ({"name": "rloo"}, plain.rloo),
    "ppo + value": ({"name": "ppo"}, plain.ppo),
    "wapo": ({"name": "wapo", "norm_length": 1024}, plain.wapo),
    "lpo": ({"name": "lpo"}, plain.lpo),
    "tpo": ({"name": "tpo"}, plain.tpo),
}


def make_batch(tokens: int, longest: int = 1024, group_size: int = 8) -> TokenBatch:
    """About `tokens` tokens in responses of 1/8 to all of `longest`, in groups of 8."""
    generator = torch.Generator().manual_seed(0)
    count = max(group_size, int(tokens / (longest * 9 / 16)) // group_size * group_size)
    lengths = torch.randint(longest // 8, longest + 1, (count,), generator=generator)
    total = int(lengths.sum())

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator)

    logp = -torch.rand(total, generator=generator)
    return TokenBatch(
        sequence=torch.arange(count).repeat_interleave(lengths),
        mask=torch.rand(total, generator=generator) < 0.95,
        group=torch.arange(count // group_size).repeat_interleave(group_size),
        reward=(torch.rand(count, generator=generator) < 0.4).float(),
        logp=logp,
        old_logp=logp + noise(0.1),
        ref_logp=logp + noise(0.2),
        values=noise(0.3),
        old_values=noise(0.3),
    )


def padded(batch: TokenBatch, flat: torch.Tensor) -> torch.Tensor:
    """[T] -> [N, L], zeros after the end."""
    lengths = torch.bincount(batch.sequence)
    position = torch.arange(batch.num_tokens) - (lengths.cumsum(0) - lengths)[batch.sequence]
    return flat.new_zeros(len(lengths), int(lengths.max())).index_put_((batch.sequence, position), flat)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that `run` holds at the same time, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each, taking turns so that a busy machine slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def row(name: str, took: dict[str, float], memory: dict[str, int]) -> dict[str, float | str]:
    return {
        "family": name,
        "ms": 1e3 * took["ours"],
        "plain_ms": 1e3 * took["plain"],
        "time_ratio": took["ours"] / took["plain"],
        "mib": memory["ours"] / 2**20,
        "plain_mib": memory["plain"] / 2**20,
        "memory_ratio": memory["ours"] / memory["plain"],
    }


def compare(name: str, batch: TokenBatch, rounds: int) -> dict[str, float | str]:
    spec, formulation = FAMILIES[name]
    objective = make_objective(spec)
    prepared = objective.prepare(batch)
    update, tokens = objective.begin_update(prepared), torch.arange(batch.num_tokens)
    flat = {"logp": batch.logp.clone().requires_grad_(), "values": batch.values.clone().requires_grad_()}
    grid = {key: padded(batch, value.detach()).requires_grad_() for key, value in flat.items()}
    fixed = {"mask": padded(batch, batch.mask), "advantage": padded(batch, prepared.advantages), "old": padded(batch, batch.old_logp),
             "ref": padded(batch, batch.ref_logp), "old_values": padded(batch, batch.old_values), "group": batch.group,
             "reward": batch.reward}  # fmt: skip
    if prepared.value_targets is not None:
        fixed["targets"] = padded(batch, prepared.value_targets)

    def ours() -> torch.Tensor:
        out = objective.loss(update, tokens, flat["logp"], values=flat["values"] if objective.uses_value_model else None)
        (out.loss if out.value_loss is None else out.loss + out.value_loss).backward()
        return out.loss

    def theirs() -> torch.Tensor:
        out = formulation(**grid, **fixed)
        out = out if isinstance(out, tuple) else (out,)
        sum(out).backward()
        return out[0]

    losses = ours().item(), theirs().item()
    gradients = padded(batch, flat["logp"].grad), grid["logp"].grad
    if abs(losses[0] - losses[1]) > 1e-4 * (1 + abs(losses[1])) or not torch.allclose(*gradients, rtol=1e-3, atol=1e-8):
        raise SystemExit(f"{name}: the two formulations differ: {losses}, {float((gradients[0] - gradients[1]).abs().max())}")
    took = seconds({"ours": ours, "plain": theirs}, rounds)
    memory = peak_bytes(ours), peak_bytes(theirs)
    return row(name, took, {"ours": memory[0], "plain": memory[1]})


def compare_gae(batch: TokenBatch, rounds: int) -> dict[str, float | str]:
    """The advantage estimator: doubling over the flat tokens against the loop over positions."""
    keep = batch.mask
    rewards, values, sequence = torch.randn(batch.num_tokens)[keep], batch.old_values[keep], batch.sequence[keep]
    after, decay = torch.zeros(batch.num_responses), torch.full((batch.num_responses,), 0.95)
    full = torch.zeros(batch.num_tokens)
    full[keep] = rewards
    grids = padded(batch, full), padded(batch, batch.old_values), padded(batch, batch.mask)
    runs = {
        "ours": lambda: generalized_advantages(rewards, values, sequence, after, 1.0, decay),
        "plain": lambda: plain.gae(*grids, 0.95),
    }
    if not torch.allclose(runs["ours"](), runs["plain"]()[padded(batch, batch.mask)], atol=1e-4):
        raise SystemExit("gae: the two formulations differ")
    took = seconds(runs, max(3, rounds // 4))
    memory = {name: peak_bytes(run) for name, run in runs.items()}
    return row("gae (prepare)", took, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(options.tokens)
    rows = [compare(name, batch, options.rounds) for name in FAMILIES] + [compare_gae(batch, options.rounds)]
    if options.json:
        print(json.dumps({"tokens": batch.num_tokens, "responses": batch.num_responses, "rows": rows}, indent=1))
        return
    print(f"{batch.num_tokens} tokens in {batch.num_responses} responses, float32, one thread; loss and backward")
    print(f"{'family':14} {'ms':>8} {'plain':>8} {'ratio':>6}   {'MiB':>7} {'plain':>7} {'ratio':>6}")
    for r in rows:
        print(f"{r['family']:14} {r['ms']:8.2f} {r['plain_ms']:8.2f} {r['time_ratio']:6.2f}   "
              f"{r['mib']:7.2f} {r['plain_mib']:7.2f} {r['memory_ratio']:6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
