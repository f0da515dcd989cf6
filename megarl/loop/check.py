"""`megarl check`: what a recipe's data and verifier amount to, before anything is started."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.load import Loaded
from megarl.config.recipe import Recipe
from megarl.errors import CheckFailed
from megarl.tasks.dataset import Example, read_examples
from megarl.tasks.judging import Judge
from megarl.tasks.prompts import Prompt, load_tokenizer, tokenize
from megarl.tasks.references import reference_responses
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import check_examples

BINS, BAR = 10, 40
SHOWN_REJECTIONS = 5
NO_LIMIT = 1 << 62


def run(loaded: Loaded[Recipe], sample: int, shown: int) -> int:
    """Print, for each data file, prompts as the model will see them, lengths, what the limits drop, and what the verifier says about the
    references of `sample` examples. CheckFailed if it rejects one; InputError for whatever a run would refuse.
    """
    recipe = loaded.recipe
    tokenizer = load_tokenizer(recipe.model.path)
    verifier = recipe.verifier
    rejected: list[str] = []
    with loaded.naming("verifier"):
        judge = Judge(verifier.name, verifier.args, workers=verifier.workers, timeout_s=verifier.timeout_s, memory_mib=verifier.memory_mib)
    with judge:
        for path in dict.fromkeys([*recipe.data.sources, *recipe.data.evaluation.values()]):
            examples = read_examples(path, recipe.data.columns)
            check_examples(verifier.name, examples)
            prompts, _ = tokenize(examples, tokenizer, NO_LIMIT, chat=recipe.data.chat)
            print(f"== {path}: {len(examples):,} examples\n")
            for prompt in prompts[:shown]:
                print(show_prompt(prompt), end="\n\n")
            print(lengths(recipe, prompts), end="\n\n")
            chosen = random.Random(recipe.seed).sample(examples, min(sample, len(examples)))
            references = judge_references(judge, verifier.name, chosen)
            print(references.text(recipe), end="\n\n")
            rejected += [f"{path}: {line}" for line in references.rejected]
    if rejected:
        more = f"\n  and {len(rejected) - SHOWN_REJECTIONS} more" if len(rejected) > SHOWN_REJECTIONS else ""
        lines = "".join(f"\n  {line}" for line in rejected[:SHOWN_REJECTIONS])
        raise CheckFailed(f"{len(rejected)} references are rejected by their own verifier:{lines}{more}")
    return 0


def show_prompt(prompt: Prompt) -> str:
    """A prompt as the model will see it, and its answer."""
    answer = json.dumps(prompt.example.answer, ensure_ascii=False)
    return f'-- example "{prompt.id}", {len(prompt.token_ids)} tokens\n{prompt.text}\n-- answer\n{answer:.2000}'


def lengths(recipe: Recipe, prompts: Sequence[Prompt]) -> str:
    """Histogram of the prompts' lengths, and what `data.max_prompt_length` does to them."""
    tokens = np.array([len(prompt.token_ids) for prompt in prompts])
    limit, policy = recipe.data.max_prompt_length, recipe.data.too_long
    above = int((tokens > limit).sum())
    effect = {"error": "the run is refused", "drop": "they are left out", "cut_left": "they are cut at their beginning"}[policy]
    note = f"{above:,} above data.max_prompt_length ({limit}): {effect}" if above else f"none above data.max_prompt_length ({limit})"
    return f"-- prompt lengths in tokens; {note}\n{histogram(tokens)}"


def histogram(values: np.ndarray) -> str:
    """Counts of whole numbers in up to ten intervals of the same width, one line each."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // BINS)
    counts = np.bincount((values - low) // width)
    rows = [(f"{low + i * width}-{min(low + (i + 1) * width - 1, high)}", int(count)) for i, count in enumerate(counts)]
    return "\n".join(f"{name:>15} {count:9,} {'#' * round(BAR * count / counts.max())}".rstrip() for name, count in rows)


@dataclass
class References:
    """What the verifier says about references: `verdicts` of all responses tried, `judged` examples, `rejected` ones in words."""

    verdicts: list[Verdict]
    seconds: float
    judged: int
    without: int
    rejected: list[str]

    def text(self, recipe: Recipe) -> str:
        """In words, with the verifier's speed and what it means for a step."""
        if not self.verdicts:
            return "-- references: the examples hold no responses that could be judged"
        rate = len(self.verdicts) / max(self.seconds, 1e-9)
        step = recipe.rollout.prompts_per_step * recipe.rollout.responses_per_prompt
        return (
            f"-- references: {self.judged - len(self.rejected)} of {self.judged} accepted"
            + (f" ({self.without} have none)" if self.without else "")
            + f"\n   {rate:,.0f} verdicts per second: {step / rate:.2f} s for the {step} responses of a step"
        )


def judge_references(judge: Judge, verifier: str, examples: Sequence[Example]) -> References:
    """Judge the reference responses of each example; an example is rejected if none of its own is `ok`."""
    own = [reference_responses(verifier, example) for example in examples]
    pairs = [(response, example) for example, responses in zip(examples, own, strict=True) for response in responses]
    if pairs:  # the time to start the workers is not the verifier's
        judge([pairs[0][0]], [pairs[0][1]])
    began = time.monotonic()
    verdicts = judge([response for response, _ in pairs], [example for _, example in pairs])
    seconds = time.monotonic() - began
    rejected, position = [], 0
    for example, responses in zip(examples, own, strict=True):
        mine = verdicts[position : position + len(responses)]
        position += len(responses)
        if mine and not any(verdict.status == "ok" for verdict in mine):
            reasons = dict.fromkeys(f"{verdict.status}: {verdict.detail}" if verdict.detail else verdict.status for verdict in mine)
            rejected.append(f'example "{example.id}", answer {str(example.answer)!r:.80} ({"; ".join(reasons):.200})')
    judged = sum(bool(responses) for responses in own)
    return References(verdicts, seconds, judged, len(examples) - judged, rejected)
