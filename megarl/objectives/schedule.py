"""LPO's divergence and temperature over the course of a run (named as future work in 2605.06139; the forms here are our own).

objective:
  name: lpo
  divergence: forward_kl
  schedule:
    divergence: {to: reverse_kl, after_step: 50}          # and/or below_entropy: 0.3
    tau: {from: 1.0, to: 0.2, steps: 200}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.errors import InputError
from megarl.objectives.parameters import DIVERGENCES, REQUIRED, finite_number, number, positive_integer, section, word


def _step(name: str, value: Any) -> int | None:
    if value is None:
        return None
    result = finite_number(name, value)
    if result < 0 or result != int(result):
        raise InputError(f"`{name}` is {value!r}; expected a whole number >= 0")
    return int(result)


@dataclass(frozen=True)
class Schedule:
    """A pure function of step and entropy, so that a resumed run takes the same turns."""

    divergence: dict[str, Any] | None
    tau: dict[str, Any] | None

    @staticmethod
    def parse(owner: str, given: Any) -> Schedule | None:
        """Check the recipe's `schedule`. Raises InputError naming what is wrong; only lpo takes one."""
        if given is None:
            return None
        if owner != "lpo":
            raise InputError(f"objective `{owner}` takes no `schedule`; only `lpo` does")
        parts = section("schedule", given, {"divergence": (_divergence, None), "tau": (_tau, None)})
        return Schedule(parts["divergence"], parts["tau"])

    def parameters(self, step: int, entropy: float | None) -> dict[str, Any]:
        """The parameters that the schedule sets at `step` (from 1), with the policy's mean `entropy` in nats if it is known.

        Steps up to `after_step` have the first divergence; a switch on entropy is not remembered: above the threshold the first one holds
        again. tau goes geometrically, `from` at step 1 and `to` after `steps` more.
        """
        result: dict[str, Any] = {}
        if (switch := self.divergence) is not None:
            late = switch["after_step"] is not None and step > switch["after_step"]
            low = switch["below_entropy"] is not None and entropy is not None and entropy < switch["below_entropy"]
            if late or low:
                result["divergence"] = switch["to"]
        if (anneal := self.tau) is not None:
            done = min(1.0, max(0, step - 1) / anneal["steps"])
            result["tau"] = anneal["from"] ** (1 - done) * anneal["to"] ** done
        return result


def _divergence(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    entries = {"to": (word(*DIVERGENCES), REQUIRED), "after_step": (_step, None), "below_entropy": (number(0, null=True), None)}
    result = section(name, value, entries)
    if result["after_step"] is None and result["below_entropy"] is None:
        raise InputError(f"`{name}` of the schedule says not when; expected `after_step` or `below_entropy`")
    return result


def _tau(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    positive = number(0, above=True)
    return section(name, value, {"from": (positive, REQUIRED), "to": (positive, REQUIRED), "steps": (positive_integer, REQUIRED)})
