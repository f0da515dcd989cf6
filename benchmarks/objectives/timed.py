"""An objective for a recipe that trains with another one at each step and notes the seconds spent in its methods.

objective: {name: "benchmarks.objectives.timed:Timed", objectives: [{name: grpo}, ...], log: FOLDER}
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from megarl.objectives import make_objective

METHODS = ("prepare", "begin_update", "scalars", "finish_scalars", "coefficients", "loss")


class Timed:
    uses_value_model = False
    couples_groups = True

    def __init__(self, parameters):
        self.parts = [make_objective(spec) for spec in parameters["objectives"]]
        self.log = Path(parameters["log"])
        self.needs = frozenset().union(*(part.needs for part in self.parts))

    def at(self, step, entropy=None):
        return TimedStep(self.parts[(step - 1) % len(self.parts)].at(step, entropy), step, self.log / f"{os.getpid()}.jsonl")


class TimedStep:
    """One step's objective: everything is handed on, the calls are timed. The backward pass of a loss counts as part of it."""

    def __init__(self, objective, step, log):
        self.objective, self.step, self.log = objective, step, log

    def __getattr__(self, name):
        found = getattr(self.objective, name)
        return self._timed(name, found) if name in METHODS else found

    def _timed(self, name, method):
        def call(*args, **kwargs):
            begun = time.perf_counter()
            result = method(*args, **kwargs)
            if name == "loss" and result.loss.requires_grad:
                torch.autograd.grad(result.loss, args[2], retain_graph=True)
            seconds = time.perf_counter() - begun
            with self.log.open("a") as file:
                file.write(json.dumps({"step": self.step, "method": name, "seconds": seconds}) + "\n")
            return result

        return call
