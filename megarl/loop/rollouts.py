"""From judged responses to what the objective and the trainer see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megarl.errors import InputError
from megarl.objectives import TokenBatch
from megarl.rollout.response import Response
from megarl.tasks.prompts import Prompt
from megarl.tasks.verdict import Verdict, VerdictCounts
from megarl.training.sequences import Sequences


@dataclass
class JudgedRollouts:
    """The prompts of one step or evaluation with `n` responses each, ordered by prompt, then sample."""

    prompts: Sequence[Prompt]
    responses: list[Response]
    texts: list[str]
    verdicts: list[Verdict]
    first: int = 0
    """The `prompt_index` of the first prompt: above 0 in a later part of a step."""

    @classmethod
    def joined(cls, parts: Sequence[JudgedRollouts]) -> JudgedRollouts:
        """The parts of a step, in order, as one."""
        every = lambda name: [item for part in parts for item in getattr(part, name)]
        return parts[0] if len(parts) == 1 else cls(every("prompts"), every("responses"), every("texts"), every("verdicts"), parts[0].first)

    def groups(self, chosen: Sequence[int]) -> JudgedRollouts:
        """The prompts at `chosen` with their responses."""
        pick = lambda items: [items[i * self.n + j] for i in chosen for j in range(self.n)]
        prompts = [self.prompts[i] for i in chosen]
        responses = [replace(response, prompt_index=self.first + i // self.n) for i, response in enumerate(pick(self.responses))]
        return JudgedRollouts(prompts, responses, pick(self.texts), pick(self.verdicts), self.first)

    @property
    def n(self) -> int:
        return len(self.responses) // len(self.prompts)

    @property
    def rewards(self) -> np.ndarray:
        """[prompts * n] float64"""
        return np.array([verdict.reward for verdict in self.verdicts], dtype=np.float64)

    @property
    def correct(self) -> np.ndarray:
        """[prompts, n] bool"""
        return np.array([verdict.status == "ok" for verdict in self.verdicts]).reshape(len(self.prompts), -1)

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return sum(len(response.token_ids) for response in self.responses)

    def metrics(self) -> dict[str, float]:
        """Rewards, lengths and verdicts. The entropy is the mean of -log p over all sampled tokens: an unbiased estimate."""
        lengths = np.array([len(response.token_ids) for response in self.responses])
        logprobs = np.concatenate([np.asarray(response.logprobs, dtype=np.float64) for response in self.responses])
        correct = self.correct
        return {
            "reward/mean": float(self.rewards.mean()),
            "reward/std": float(self.rewards.std()),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated_share": float(np.mean([response.finish_reason == "length" for response in self.responses])),
            "policy/entropy": float(-logprobs.mean()) if len(logprobs) else 0.0,
            "groups/all_right_share": float(correct.all(axis=1).mean()),
            "groups/all_wrong_share": float((~correct).all(axis=1).mean()),
            **VerdictCounts.of(self.verdicts).shares(),
        }

    def records(self, prompts: int, samples: int) -> list[dict[str, Any]]:
        """The first responses of the first prompts, for people to read."""
        chosen = [i * self.n + j for i in range(min(prompts, len(self.prompts))) for j in range(min(samples, self.n))]
        return [
            {
                "prompt_id": self.prompts[i // self.n].id,
                "prompt": self.prompts[i // self.n].text,
                "sample": i % self.n,
                "response": self.texts[i],
                "answer": self.prompts[i // self.n].example.answer,
                "verdict": self.verdicts[i].status,
                "reward": self.verdicts[i].reward,
                "length": len(self.responses[i].token_ids),
            }
            for i in chosen
        ]

    def reward_vectors(self) -> list[torch.Tensor]:
        """N matrices [m, k]; a response about which nothing is known has m = 0."""
        matrices = []
        for i, verdict in enumerate(self.verdicts):
            if verdict.vector is None and verdict.status not in ("timeout", "crash", "skipped"):
                raise InputError(
                    f"example {self.prompts[i // self.n].id!r}: the verifier gave a number as reward; the objective needs reward vectors "
                    "(`Verdict.vector`; with `countdown`: verifier.args.components = true)."
                )
            rows = torch.tensor(verdict.vector or [], dtype=torch.float64)
            matrices.append(rows if rows.dim() == 2 else rows.reshape(0, 0))
        return matrices

    def sequences(self) -> Sequences:
        """Prompt and response tokens, for the trainer."""
        prompts = [self.prompts[response.prompt_index - self.first].token_ids for response in self.responses]
        return Sequences.of(prompts, [response.token_ids for response in self.responses])

    def token_batch(
        self,
        *,
        step: int,
        seed: int,
        old_logp: np.ndarray | None = None,
        ref_logp: np.ndarray | None = None,
        entropy: np.ndarray | None = None,
        vectors: bool = False,
    ) -> TokenBatch:
        """The objective's flat batch; [T] arrays are in the order of the response tokens. Groups are the prompts.

        `vectors`: rewards are the verdicts' matrices. Raises InputError if the verifier gives none.
        """
        lengths = torch.tensor([len(response.token_ids) for response in self.responses])
        rollout_logp = torch.tensor([x for response in self.responses for x in response.logprobs], dtype=torch.float32)
        optional = lambda array: None if array is None else torch.from_numpy(array)
        return TokenBatch(
            sequence=torch.repeat_interleave(torch.arange(len(self.responses)), lengths),
            mask=torch.ones(len(rollout_logp), dtype=torch.bool),
            group=torch.tensor([response.prompt_index - self.first for response in self.responses]),
            reward=self.reward_vectors() if vectors else torch.from_numpy(self.rewards),
            correct=torch.from_numpy(self.correct.reshape(-1)),
            truncated=torch.tensor([response.finish_reason == "length" for response in self.responses]),
            old_logp=optional(old_logp),
            rollout_logp=rollout_logp,
            ref_logp=optional(ref_logp),
            entropy=optional(entropy),
            group_ids=[prompt.id for prompt in self.prompts],
            step=step,
            seed=seed,
        )


def leave_out(batch: TokenBatch, verdicts: Sequence[Verdict]) -> TokenBatch:
    """The batch, one verdict per response, with those not in the loss in groups of their own at the end and without trained tokens.

    So no statistic of their prompt's group sees them.
    """
    out = torch.tensor([not verdict.in_loss for verdict in verdicts])
    alone = int(out.sum())
    group = batch.group.clone()
    group[out] = batch.num_groups + torch.arange(alone)
    names = [f"left out {i}" for i in range(alone)]
    return replace(batch, group=group, mask=batch.mask & ~out[batch.sequence], group_ids=batch.group_ids + names)
