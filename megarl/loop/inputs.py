"""What a recipe names, read and checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from megarl.config.load import Loaded
from megarl.config.recipe import Recipe
from megarl.errors import InputError
from megarl.loop.rollouts import JudgedRollouts
from megarl.objectives import make_objective
from megarl.rollout.engine import EngineConfig
from megarl.rollout.response import Response
from megarl.rollout.sampling import Sampling
from megarl.tasks.dataset import read_examples
from megarl.tasks.judging import Judge, apply_effects, check_shares
from megarl.tasks.prompts import Prompt, eos_token_ids, load_tokenizer, tokenize
from megarl.tasks.stream import make_stream
from megarl.tasks.verifiers import check_examples
from megarl.training.sequences import Sequences
from megarl.training.trainer import rank_config


class Inputs:
    """A wrong input costs seconds here, not the start of a cluster. Raises InputError naming it."""

    def __init__(self, loaded: Loaded[Recipe]):
        self.recipe = recipe = loaded.recipe
        with loaded.naming("objective"):
            self.objective = make_objective(recipe.objective)
            if self.objective.uses_value_model:
                raise InputError(f"objective.name: {recipe.objective['name']!r} trains with a value model, which this version has not got.")
            self._check_objective()
        with loaded.naming("verifier"):
            verifier = recipe.verifier
            self._judge = Judge(
                verifier.name, verifier.args, workers=verifier.workers, timeout_s=verifier.timeout_s, memory_mib=verifier.memory_mib
            )
        self.rank_config = rank_config(
            model_path=recipe.model.path,
            pad_vocab_to=recipe.model.pad_vocab_to_multiple_of,
            training=recipe.training,
            objective=recipe.objective,
            temperature=recipe.rollout.temperature,
            seed=recipe.seed,
        )
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.stop_token_ids = eos_token_ids(recipe.model.path, self.rank_config.shape.vocab_size)
        self.too_long: dict[str, int] = {}
        self.stream = make_stream(recipe.data.train, self._prompts, recipe.seed, recipe.data.shuffle)
        self.stream.check_batch(recipe.rollout.prompts_per_step)
        self.evaluation = {name: self._prompts(path)[: recipe.evaluation.max_prompts] for name, path in recipe.data.evaluation.items()}
        self._check_lengths()

    def _prompts(self, path: str) -> list[Prompt]:
        data = self.recipe.data
        examples = read_examples(path, data.columns)
        check_examples(self.recipe.verifier.name, examples)
        prompts, self.too_long[path] = tokenize(examples, self.tokenizer, data.max_prompt_length, chat=data.chat, too_long=data.too_long)
        return prompts

    def _check_objective(self) -> None:
        recipe, objective, name = self.recipe, self.objective, self.recipe.objective["name"]
        if recipe.replay is not None and not objective.replayable:
            raise InputError(
                f"replay: objective `{name}` cannot train on groups of earlier steps; expected replay: null, or objective lpo."
            )
        if recipe.training.step_lists is not None and objective.coupling != "group":
            raise InputError(
                f"training.step_lists: objective `{name}` does not compare the responses of a group as a list; expected null, or a "
                "listwise objective (lpo, tpo)."
            )
        if recipe.training.step_lists is not None:
            for parameter in ("overlong", "drop_degenerate_groups"):
                if recipe.objective.get(parameter):
                    raise InputError(
                        f"training.step_lists: `{parameter}` judges whole responses, but lists compare segments; expected it to be off."
                    )
        if recipe.training.old_logprobs == "rollout" and getattr(objective, "parameters", {}).get("correction"):
            raise InputError(
                "training.old_logprobs: rollout takes the engine's log-probs for the old ones, so `correction` would be without effect; "
                "expected recompute, or an objective without it."
            )
        if recipe.rollout.overlap_training and objective.couples_groups:
            raise InputError(
                f"rollout.overlap_training: objective `{name}` with these parameters has statistics over the whole batch; expected false."
            )

    def ends_segment(self, sequences: Sequences) -> np.ndarray:
        """[T] bool: response tokens whose text holds one of `training.step_lists.separators`."""
        tokens = sequences.response_tokens
        distinct, where = np.unique(tokens, return_inverse=True)
        texts = self.tokenizer.batch_decode(distinct[:, None].tolist())
        separators = self.recipe.training.step_lists.separators
        return np.array([any(separator in text for separator in separators) for text in texts], dtype=bool)[where]

    def _check_lengths(self) -> None:
        shape, rollout = self.rank_config.shape, self.recipe.rollout
        if self.longest > shape.max_positions:
            raise InputError(
                f"data.max_prompt_length {self.recipe.data.max_prompt_length} + rollout.max_response_length {rollout.max_response_length} "
                f"= {self.longest} tokens; the model in {self.recipe.model.path} has {shape.max_positions} positions."
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return self.recipe.data.max_prompt_length + self.recipe.rollout.max_response_length

    def engine_config(self) -> EngineConfig:
        rollout = self.recipe.rollout
        return EngineConfig(
            model=os.path.abspath(self.recipe.model.path),
            max_model_len=self.longest,
            max_num_seqs=rollout.max_concurrent_sequences,
            dtype=rollout.dtype,
            tensor_parallel=rollout.tensor_parallel,
            prefix_caching=rollout.prefix_caching,
            kv_cache_bytes=None if rollout.kv_cache_mib is None else rollout.kv_cache_mib << 20,
            gpu_memory_fraction=rollout.gpu_memory_fraction,
        )

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.recipe.rollout.max_response_length, self.stop_token_ids)

    def judge(self, prompts: Sequence[Prompt], responses: list[Response], first: int = 0) -> JudgedRollouts:
        """Decode and verify the responses to `prompts`, whose indices begin at `first`. A verifier sees text without special tokens.

        RunFailed if more verdicts than the recipe allows say nothing about their response.
        """
        texts = self.tokenizer.batch_decode([response.token_ids for response in responses], skip_special_tokens=True)
        examples = [prompts[response.prompt_index - first].example for response in responses]
        verdicts, verifier = self._judge(texts, examples), self.recipe.verifier
        check_shares(verdicts, {"timeout": verifier.max_timeout_share, "crash": verifier.max_crash_share})
        verdicts = apply_effects(verdicts, {"timeout": verifier.on_timeout, "crash": verifier.on_crash})
        return JudgedRollouts(prompts, responses, texts, verdicts, first)


def engine_threads(recipe: Recipe) -> int:
    """CPU threads of one engine: its share of the cores, or one where training runs beside it."""
    return 1 if recipe.rollout.overlap_training else max(1, (os.cpu_count() or 1) // recipe.rollout.engines)
