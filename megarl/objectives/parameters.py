"""The parameters of the objectives: their names, types and ranges. Every refusal names the parameter."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megarl.errors import InputError

Check = Callable[[str, Any], Any]
"""(name, value) -> the value as the objective uses it; raises InputError."""

RATIOS = ("token", "sequence", "none")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
STDS = ("none", "population", "unbiased")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "token_mis", "icepop", "sequence_mis", "geometric")
DIVERGENCES = ("forward_kl", "reverse_kl", "js", "hellinger", "alpha", "tv", "chi2_reverse", "chi2_forward")
TAUS = ("group_std", "one", "group_mean", "rloo", "batch_std")
CLIP_MODES = ("hard", "pessimistic", "none")


def unknown(kind: str, name: Any, known: Iterable[str], owner: str = "") -> InputError:
    """The error for a name that is not known, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    suggestion = f"; did you mean `{near[0]}`?" if near else ""
    return InputError(
        f"unknown {kind} `{name}`{owner}{suggestion} Known: {', '.join(known)}"
        if near
        else f"unknown {kind} `{name}`{owner}. Known: {', '.join(known)}"
    )


def finite_number(name: str, value: Any) -> float:
    """`value` as a finite float; a boolean is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"`{name}` is {value!r}; expected a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InputError(f"`{name}` is {value!r}; expected a finite number")
    return result


def number(minimum: float = -math.inf, maximum: float = math.inf, *, above: bool = False, below: bool = False, null: bool = False) -> Check:
    """A number in [minimum, maximum]; `above`/`below` leave the ends out, `null` also admits None."""

    def check(name: str, value: Any) -> float | None:
        if value is None and null:
            return None
        result = finite_number(name, value)
        low = result > minimum if above else result >= minimum
        high = result < maximum if below else result <= maximum
        if not (low and high):
            parts = []
            if minimum > -math.inf:
                parts.append(f"{'>' if above else '>='} {minimum:g}")
            if maximum < math.inf:
                parts.append(f"{'<' if below else '<='} {maximum:g}")
            raise InputError(f"`{name}` is {value!r}; expected a number {' and '.join(parts)}")
        return result

    return check


def positive_integer(name: str, value: Any) -> int:
    result = finite_number(name, value)
    if result <= 0 or result != int(result):
        raise InputError(f"`{name}` is {value!r}; expected a whole number > 0")
    return int(result)


def word(*words: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            near = difflib.get_close_matches(str(value), words, n=1)
            raise InputError(f"`{name}` is {value!r}; expected one of {', '.join(words)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"`{name}` is {value!r}; expected true or false")
    return value


REQUIRED = object()


def section(name: str, value: Any, entries: Mapping[str, tuple[Check, Any]]) -> dict[str, Any]:
    """A nested group of parameters: `entries` maps each to its check and default (REQUIRED: none)."""
    if not isinstance(value, Mapping):
        raise InputError(f"`{name}` is {value!r}; expected null or a mapping with {', '.join(entries)}")
    for key in value:
        if key not in entries:
            raise unknown("parameter", key, entries, f" in `{name}`")
    result = {}
    for key, (check, default) in entries.items():
        if key in value:
            result[key] = check(key, value[key])
        elif default is REQUIRED:
            raise InputError(f"`{name}` lacks `{key}`")
        else:
            result[key] = default
    return result


def kl_section(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    entries = {"coef": (number(0), REQUIRED), "estimator": (word(*KL_ESTIMATORS), "k3"), "where": (word("loss", "reward"), "loss")}
    result = section(name, value, entries)
    return result if result["coef"] > 0 else None


def correction_section(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    bound = number(0, null=True)
    entries = {"kind": (word(*CORRECTIONS), "none"), "low": (bound, None), "high": (bound, None), "normalize": (flag, False)}
    result = section(name, value, entries)
    if result["low"] is not None and result["high"] is not None and result["low"] > result["high"]:
        raise InputError(f"`low` is {result['low']:g} and `high` is {result['high']:g} in `{name}`; expected low <= high")
    return result if result["kind"] != "none" else None


def overlong_section(name: str, value: Any) -> dict[str, Any] | str | None:
    if value is None or value == "mask":
        return value
    if isinstance(value, str):
        raise InputError(f"`{name}` is {value!r}; expected null, mask, or a mapping with max_length, cache, factor")
    entries = {"max_length": (number(0, above=True), REQUIRED), "cache": (number(0), REQUIRED), "factor": (number(0), 1.0)}
    result = section(name, value, entries)
    if result["cache"] > result["max_length"]:
        raise InputError(f"`cache` is {result['cache']:g}; expected at most `max_length` ({result['max_length']:g})")
    return result


def tau_word_or_number(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return word(*TAUS)(name, value)
    return number(0, above=True)(name, value)


CHECKS: dict[str, Check] = {
    "clip_low": number(0, null=True),
    "clip_high": number(0, null=True),
    "dual_clip": number(1, above=True, null=True),
    "ratio": word(*RATIOS),
    "std": word(*STDS),
    "std_eps": number(0),
    "equal_tol": number(0),
    "aggregation": word(*AGGREGATIONS),
    "norm_length": number(0, above=True, null=True),
    "kl": kl_section,
    "entropy_coef": number(),
    "top_entropy_fraction": number(0, 1, above=True, null=True),
    "overlong": overlong_section,
    "correction": correction_section,
    "drop_degenerate_groups": flag,
    "gamma": number(0, 1),
    "lambda": number(0, 1),
    "lambda_critic": number(0, 1, null=True),
    "bootstrap_truncated": flag,
    "whiten": flag,
    "value_clip": number(0, null=True),
    "value_coef": number(0),
    "nll_coef": number(0),
    "alpha": number(0, above=True),
    "positive_weight": number(0),
    "num_weights": positive_integer,
    "sampler": word("iid", "sobol"),
    "normalize": word("norm_length", "kept_tokens"),
    "divergence": word(*DIVERGENCES),
    "tau": tau_word_or_number,
    "clip_mode": word(*CLIP_MODES),
    "pointwise": flag,
    "eta": number(0, above=True),
}

OFF: dict[str, Any] = {
    "clip_low": None, "clip_high": None, "dual_clip": None, "ratio": "none", "std": "none", "std_eps": 1e-6, "equal_tol": 1e-8,
    "aggregation": "token_mean", "norm_length": None, "kl": None, "entropy_coef": 0.0, "top_entropy_fraction": None, "overlong": None,
    "correction": None, "drop_degenerate_groups": False, "whiten": False, "nll_coef": 0.0, "bootstrap_truncated": False,
}  # fmt: skip
"""What a common parameter is for an objective that does not take it."""


def resolve_parameters(
    owner: str, given: Mapping[str, Any], defaults: Mapping[str, Any], checks: Mapping[str, Check] | None = None
) -> dict[str, Any]:
    """Check `given` against the parameters that the objective `owner` takes (`defaults`) and fill in the rest.

    Returns every parameter by name. Raises InputError for a name that is unknown or not taken and for a value out of range.
    """
    checks = {**CHECKS, **(checks or {})}
    for name in given:
        if name not in defaults:
            if name in CHECKS:
                raise InputError(f"objective `{owner}` takes no parameter `{name}`. It takes: {', '.join(defaults)}")
            raise unknown("parameter", name, defaults, f" of objective `{owner}`")
    result = dict(OFF)
    for name, default in defaults.items():
        check = checks.get(name, lambda _, value: value)
        result[name] = check(name, given.get(name, default))
    return result
