"""A training step of this package beside a bare Megatron-core loop, in turn, on the same ranks, model, tokens and layout.

    PYTHONPATH=. .venv/bin/python benchmarks/train_step/run.py [--rounds 5] [--layout one --layout TP2 ...]

The bare loop is what Megatron's own pre-training does: GPTModel with labels, vocabulary-parallel cross entropy over all tokens, its
pipeline schedule, DDP and its optimizer, on micro-batches that are made beforehand. This package's step is a whole update with GRPO:
collating, log-probs of the response tokens, the objective, its metrics, the optimizer. Prints, for each layout, padded and packed, tokens
per second of both (real tokens, without padding) and their ratio, and what packing gains beside the share of padding that it saves.
Exits 1 if a ratio is below 0.95.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from megarl.config.recipe import Layout, Optimizer, Training
from megarl.models.hf_config import ModelShape
from megarl.objectives import TokenBatch, make_objective
from megarl.planning.shrink import write_small_model
from megarl.training.local_ranks import run_ranks
from megarl.training.rank import RankConfig, TrainingRank, UpdateSettings
from megarl.training.sequences import Sequences
from megarl.training.trainer import rank_config

LAYOUTS = {"one": {}, "TP2": {"tensor": 2}, "PP2": {"pipeline": 2}, "DP2": {"data": 2}}
SHAPE = ModelShape(
    family="qwen3", layers=8, hidden=256, ffn=768, heads=8, kv_heads=4, head_dim=32, vocab_size=4096, max_positions=1024, rope_theta=1e4,
    rope_scaling_factor=None, norm_epsilon=1e-6, tied=True, qkv_bias=False, qk_norm=True,
)  # fmt: skip
PROMPT, LONGEST, GROUPS, SAMPLES, MICRO_BATCH = 32, 224, 4, 8, 2048
LEAST = 0.95


def rollouts() -> tuple[Sequences, TokenBatch]:
    """Prompts of one length with responses of 1/7 to all of LONGEST tokens."""
    rng = np.random.default_rng(0)
    count = GROUPS * SAMPLES
    prompts = [rng.integers(2, SHAPE.vocab_size, PROMPT).tolist() for _ in range(count)]
    responses = [rng.integers(2, SHAPE.vocab_size, rng.integers(LONGEST // 7, LONGEST + 1)).tolist() for _ in range(count)]
    sequences = Sequences.of(prompts, responses)
    tokens = int(sequences.response_starts[-1])
    logp = torch.full((tokens,), -float(np.log(SHAPE.vocab_size)))
    batch = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(count), torch.from_numpy(sequences.response_lengths)),
        mask=torch.ones(tokens, dtype=torch.bool),
        group=torch.arange(count) // SAMPLES,
        reward=torch.from_numpy(rng.random(count)),
        old_logp=logp,
        rollout_logp=logp,
    )
    return sequences, batch


def measure(config: RankConfig, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of both loops, in turn, on this rank; the first of each is left out."""
    import torch.distributed as dist

    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    sequences, batch = rollouts()
    objective = make_objective(config.objective)
    update = objective.begin_update(objective.prepare(batch))
    plan = config.plan(sequences, update.responses.tolist(), max_tokens=MICRO_BATCH)
    bare = bare_loop(rank, sequences, plan)
    seconds: dict[str, list[float]] = {"megarl": [], "bare": []}
    for _ in range(rounds + 1):
        for name, step in (("megarl", lambda: rank.update(sequences, update, plan, UpdateSettings(1e-4))), ("bare", bare)):
            dist.barrier()
            begun = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    return {name: values[1:] for name, values in seconds.items()}


def bare_loop(rank: TrainingRank, sequences: Sequences, plan):
    """Megatron's loop on a model and optimizer of its own."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.models.policy import _layer_spec, transformer_config
    from megarl.training.batching import collate
    from megarl.training.optimizer import build_optimizer
    from megarl.training.step import _packed_params, wrap_for_training

    config = rank.config
    settings = transformer_config(config.shape, config.layout)
    model = GPTModel(
        config=settings,
        transformer_layer_spec=_layer_spec(settings, None),
        vocab_size=config.shape.padded_vocab(config.pad_vocab_to, config.layout.tensor),
        max_sequence_length=config.shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.shape.tied,
        position_embedding_type="rope",
    )
    chunks = wrap_for_training([model], config.optimizer)
    optimizer = build_optimizer(config.optimizer, False, chunks)
    mine = plan.rows[parallel_state.get_data_parallel_rank()]
    batches = []
    for rows in mine:
        batch = collate(sequences, rows, plan, 0)
        tokens, places = torch.from_numpy(batch.tokens), torch.from_numpy(batch.position_ids)
        batches.append((tokens, places, tokens.roll(-1, 1), tokens != 0, _packed_params(batch)))
    shape = plan.fixed_shape or (1, 1)

    def forward_step(iterator, chunk):
        tokens, places, labels, mask, packed = next(iterator)
        out = chunk(tokens, places, None, labels=labels, packed_seq_params=packed)

        def finish(losses):
            total = (losses.reshape(-1) * mask.reshape(-1)).sum()
            return total, mask.sum().int(), {"loss": total.detach()}

        return out, finish

    def step():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=False,
        )
        optimizer.step()

    return step


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--layout", action="append", choices=LAYOUTS)
    args = arguments.parse_args()
    sequences, _ = rollouts()
    tokens = int(sequences.lengths.sum())
    rate, padding, ratios = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="megarl-benchmark-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        (source / "config.json").write_text('{"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": true}')
        write_small_model(Path(folder) / "model", source, SHAPE)
        print("| layout | batches | megarl tokens/s | bare Megatron tokens/s | ratio |\n|---|---|---|---|---|", flush=True)
        for name in args.layout or LAYOUTS:
            for packing in (False, True):
                training = Training(
                    steps=1, layout=Layout(**LAYOUTS[name]), packing=packing, optimizer=Optimizer(learning_rate=1e-4), threads_per_rank=1
                )
                config = rank_config(
                    model_path=f"{folder}/model", pad_vocab_to=64, training=training, objective={"name": "grpo"}, temperature=1.0, seed=0
                )
                seconds = run_ranks(config.layout.world_size, measure, config, args.rounds)[0]
                ours, bare = (statistics.median(seconds[who]) for who in ("megarl", "bare"))
                ratios[name, packing] = statistics.median(b / a for a, b in zip(seconds["megarl"], seconds["bare"], strict=True))
                kind = "packed" if packing else "padded"
                print(f"| {name} | {kind} | {tokens / ours:.0f} | {tokens / bare:.0f} | {ratios[name, packing]:.2f} |", flush=True)
                rate[name, packing] = tokens / ours
                plan = config.plan(sequences, range(len(sequences)), max_tokens=MICRO_BATCH)
                padding[name, packing] = padded_tokens(sequences, plan)
    print("\nPadded batches hold as many tokens, and take as long, as packed ones (times):")
    for name in args.layout or LAYOUTS:
        print(f"{name}: tokens {padding[name, False] / padding[name, True]:.2f}, time {rate[name, True] / rate[name, False]:.2f}")
    return int(min(ratios.values()) < LEAST)


def padded_tokens(sequences: Sequences, plan) -> int:
    """Tokens of all micro-batches, padding included."""
    from megarl.training.batching import collate

    return sum(collate(sequences, rows, plan, 0).tokens.size for batches in plan.rows for rows in batches)


if __name__ == "__main__":
    raise SystemExit(main())
