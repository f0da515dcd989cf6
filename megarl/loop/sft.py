"""Supervised warm-up on worked examples, with the trainer's own step.

The loss is the token mean of -log p over the demonstrations' tokens: the objective `raft` with every response taken as right.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megarl.config.load import Loaded
from megarl.config.recipe import SftRecipe
from megarl.config.show import to_yaml
from megarl.errors import InputError
from megarl.loop.machine import check_roles
from megarl.loop.stopping import StopRequest
from megarl.objectives import TokenBatch, make_objective
from megarl.observe.ledger import Ledger
from megarl.observe.metrics import MetricsWriter
from megarl.observe.progress import Progress
from megarl.observe.run_folder import RunFolder
from megarl.platform.rollout_env import ray_cluster
from megarl.tasks.dataset import read_examples
from megarl.tasks.prompts import Prompt, encode, eos_token_ids, load_tokenizer, tokenize
from megarl.tasks.stream import make_stream
from megarl.training.optimizer import learning_rate
from megarl.training.rank import UpdateSettings
from megarl.training.sequences import Sequences
from megarl.training.trainer import Trainer, rank_config

_OBJECTIVE = {"name": "raft"}
_UPDATES_IN_FLIGHT = 3
_SECONDS_BETWEEN_LINES = 5.0


class Demonstrations:
    """Tokenised worked examples; which one of a prompt is shown depends on the seed and the step alone."""

    def __init__(self, recipe: SftRecipe, vocab_size: int, max_positions: int):
        data = recipe.data
        tokenizer = load_tokenizer(recipe.model.path)
        end = eos_token_ids(recipe.model.path, vocab_size)
        # The tokenizer's own end token where there are several: a response ends with one of them, not with all.
        end = tokenizer.eos_token_id if tokenizer.eos_token_id in end else end[0]

        def read(path: str) -> list[Prompt]:
            examples = read_examples(path, data.columns)
            without = next((example.id for example in examples if not example.demonstrations), None)
            if without is not None:
                raise InputError(
                    f'{path}: example "{without}" has no `demonstrations`; the supervised warm-up needs a list of worked responses.'
                )
            return tokenize(examples, tokenizer, data.max_prompt_length, chat=data.chat, too_long=data.too_long)[0]

        self.stream = make_stream(data.train, read, recipe.seed, data.shuffle)
        self.stream.check_batch(min(recipe.training.batch_size, len(self.stream)))
        self._seed, self._tokenizer, self._end = recipe.seed, tokenizer, end
        self._tokens: dict[str, list[int]] = {}
        self._check_lengths(", ".join(data.sources), max_positions)

    def batch(self, step: int, size: int) -> Sequences:
        """The sequences of one update."""
        prompts: list[Prompt] = []
        while len(prompts) < size:  # a data set smaller than a batch is gone through more than once
            prompts += self.stream.take(min(size - len(prompts), len(self.stream)))
        draws = np.random.default_rng([self._seed, step]).random(size)
        chosen = [p.example.demonstrations[int(draw * len(p.example.demonstrations))] for p, draw in zip(prompts, draws, strict=True)]
        return Sequences.of([p.token_ids for p in prompts], [self._encode(text, p) for text, p in zip(chosen, prompts, strict=True)])

    def _check_lengths(self, paths: str, max_positions: int) -> None:
        for prompt in self.stream.prompts:
            for text in prompt.example.demonstrations:
                tokens = len(prompt.token_ids) + len(self._encode(text, prompt))
                if tokens > max_positions:
                    raise InputError(
                        f'{paths}: example "{prompt.id}" has {tokens} tokens with a demonstration; the model has {max_positions} positions.'
                    )

    def _encode(self, text: str, prompt: Prompt) -> list[int]:
        if text not in self._tokens:
            tokens = encode(text, self._tokenizer, prompt.id, f"demonstration {text[:40]!r}", add_special_tokens=False)
            self._tokens[text] = [*tokens, self._end]
        return self._tokens[text]


def _token_batch(sequences: Sequences) -> TokenBatch:
    lengths = torch.from_numpy(sequences.response_lengths)
    return TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
        group=torch.arange(len(sequences)),
        reward=torch.ones(len(sequences)),
        correct=torch.ones(len(sequences), dtype=torch.bool),
    )


def run(loaded: Loaded[SftRecipe]) -> int:
    """`megarl sft`: 0 when done, 128 + the signal's number when told to stop (nothing is kept then but the metrics)."""
    recipe = loaded.recipe
    RunFolder(recipe.output).refuse_used()  # before the inputs are read, which takes seconds
    check_roles(ranks=recipe.training.layout.world_size)
    config = rank_config(
        model_path=recipe.model.path,
        pad_vocab_to=recipe.model.pad_vocab_to_multiple_of,
        training=recipe.training,
        objective=_OBJECTIVE,
        temperature=1.0,
        seed=recipe.seed,
    )
    data = Demonstrations(recipe, config.shape.vocab_size, config.shape.max_positions)
    progress = Progress(recipe.training.steps)
    with RunFolder.create(recipe.output) as folder, StopRequest(progress.stage, "stopping, no model is kept") as stop:
        folder.write_recipe(to_yaml(recipe))
        folder.write_environment(recipe.seed, loaded.path)
        progress.stage(f"starting {recipe.training.layout.world_size} training rank(s)")
        with ray_cluster(), MetricsWriter(folder) as metrics:
            stop.listen()
            check_roles(ranks=recipe.training.layout.world_size)
            trainer = Trainer.start(config, max_tokens=recipe.training.micro_batch_tokens)
            try:
                progress.stage("ready")
                done = train(recipe, data, trainer, metrics, progress, stop)
                if done:
                    trainer.export(str((folder.path / "model").resolve()))
            finally:
                trainer.shutdown()
        progress.stage(f"model: {folder.path / 'model'}" if done else f"stopped; {folder.path} holds no model")
    return 0 if done else stop.exit_code


def train(recipe: SftRecipe, data: Demonstrations, trainer: Trainer, metrics: MetricsWriter, progress: Progress, stop: StopRequest) -> bool:
    """The updates; whether all were made. Several are in flight, so that no rank waits for its next batch."""
    settings, objective, ledger = recipe.training, make_objective(_OBJECTIVE), Ledger()
    in_flight: list[tuple[int, float, list]] = []
    last_line = time.monotonic()

    def finish_oldest() -> None:
        nonlocal last_line
        step, rate, references = in_flight.pop(0)
        result = {name: total / count for name, (total, count) in trainer.finish_update(references).items() if count}
        row = {"sft/loss": result["loss"], "policy/grad_norm": result["grad_norm"], "policy/learning_rate": rate}
        row |= ledger.close_step()
        metrics.write(step, row)
        if time.monotonic() - last_line > _SECONDS_BETWEEN_LINES or step == settings.steps:
            last_line = time.monotonic()
            progress.step(step, row)

    for step in range(1, settings.steps + 1):
        if stop.signal is not None:
            break
        sequences = data.batch(step, settings.batch_size)
        prepared = objective.prepare(_token_batch(sequences))
        update = objective.begin_update(prepared)
        plan = trainer.plan(sequences, range(len(sequences)))
        rate = learning_rate(settings.optimizer, step, settings.steps)
        in_flight.append((step, rate, trainer.begin_update(sequences, update, plan, UpdateSettings(rate))))
        if len(in_flight) > _UPDATES_IN_FLIGHT:
            finish_oldest()
    while in_flight:
        finish_oldest()
    return stop.signal is None
