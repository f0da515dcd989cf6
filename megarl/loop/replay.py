"""Groups of earlier steps in a run: kept, drawn, and saved with its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megarl.config.recipe import Replay as Settings
from megarl.errors import InputError
from megarl.loop.rollouts import JudgedRollouts
from megarl.objectives.replay import ReplayBuffer, StoredGroup
from megarl.rollout.response import Response
from megarl.tasks.prompts import Prompt
from megarl.tasks.verdict import Verdict

TABLE, NUMBERS = "replay.json", "replay.npz"
"""What a checkpoint holds: everything about the groups but their tokens, and those."""


@dataclass(frozen=True)
class Payload:
    prompt: Prompt
    responses: list[Response]
    verdicts: list[Verdict]


class Replay:
    """The buffer of a run, filled from its own steps."""

    def __init__(self, settings: Settings, seed: int):
        self.settings, self.seed = settings, seed
        self.buffer = ReplayBuffer(settings.capacity, settings.max_age, settings.priority, settings.age_discount)

    def __len__(self) -> int:
        return len(self.buffer.groups)

    def add(self, rollouts: JudgedRollouts, version: int) -> None:
        """Keep the groups whose rewards differ; `version` of the weights that sampled them."""
        n = rollouts.n
        for i, prompt in enumerate(rollouts.prompts):
            members = slice(i * n, (i + 1) * n)
            payload = Payload(prompt, rollouts.responses[members], rollouts.verdicts[members])
            self.buffer.add(prompt.id, version, rollouts.rewards[members].tolist(), payload)

    def draw(self, step: int, first: int) -> tuple[JudgedRollouts | None, np.ndarray]:
        """(the groups drawn for `step`, their ages in steps), None if there is none. Their prompts are numbered from `first`."""
        version = step - 1
        drawn = self.buffer.draw(self.settings.groups_per_step, version, self.seed)
        if not drawn:
            return None, np.zeros(0)
        responses = [replace(r, prompt_index=first + i) for i, group in enumerate(drawn) for r in group.payload.responses]
        verdicts = [verdict for group in drawn for verdict in group.payload.verdicts]
        rollouts = JudgedRollouts([group.payload.prompt for group in drawn], responses, [""] * len(responses), verdicts, first)
        return rollouts, np.array([version - group.version for group in drawn], dtype=np.float64)

    def save(self, folder: Path) -> None:
        """Write the groups into `folder`."""
        groups = self.buffer.state()
        responses = [response for group in groups for response in group.payload.responses]
        table = [
            {
                "prompt": group.group_id,
                "version": group.version,
                "reward_std": group.reward_std,
                "responses": [{"length": len(r.token_ids), "finish_reason": r.finish_reason} for r in group.payload.responses],
                "verdicts": [{**asdict(v), "extracted": None, "detail": ""} for v in group.payload.verdicts],
            }
            for group in groups
        ]
        (folder / TABLE).write_text(json.dumps(table))
        flat = lambda name, dtype: np.array([x for response in responses for x in getattr(response, name)], dtype=dtype)
        np.savez(folder / NUMBERS, token_ids=flat("token_ids", np.int64), logprobs=flat("logprobs", np.float64))

    def load(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """Take back what `save` wrote; `prompts` are those of the run's data. InputError if it is missing or damaged."""
        by_id = {prompt.id: prompt for prompt in prompts}
        try:
            table = json.loads((folder / TABLE).read_text())
            with np.load(folder / NUMBERS, allow_pickle=False) as numbers:
                token_ids, logprobs = numbers["token_ids"], numbers["logprobs"]
            groups, position = [], 0
            for entry in table:
                responses = []
                for sample, row in enumerate(entry["responses"]):
                    span = slice(position, position + row["length"])
                    tokens, version, position = token_ids[span].tolist(), entry["version"], span.stop
                    spans = [(version, 0, len(tokens))]
                    responses.append(Response(0, sample, tokens, logprobs[span].tolist(), row["finish_reason"], spans))
                verdicts = [Verdict(**{**v, "vector": v["vector"] and tuple(map(tuple, v["vector"]))}) for v in entry["verdicts"]]
                payload = Payload(by_id[entry["prompt"]], responses, verdicts)
                groups.append(StoredGroup(entry["prompt"], entry["version"], entry["reward_std"], payload))
            if position != len(token_ids) or len(token_ids) != len(logprobs):
                raise ValueError(f"{len(token_ids)} tokens and {len(logprobs)} log-probs for responses of {position}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder}: the replay buffer of the checkpoint is missing or damaged ({error!r}).") from None
        self.buffer.restore(groups)
