"""Verifiers by name or import path, and the judging of a batch.

A verifier of your own is a function `function(response, answer, metadata, **args)` that returns a `Verdict` or a number: the reward, where
1 or more counts as right. It is named by its import path `package.module:function`.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.names import nearest
from megarl.tasks.verdict import Verdict

Verifier = Callable[[str, Example], Verdict]

BUILTIN = {
    "countdown": ("megarl.tasks.countdown", "make_countdown"),
    "math": ("megarl.tasks.math_answers", "make_math"),
    "maze": ("megarl.tasks.maze", "make_maze"),
    "multi_hop": ("megarl.tasks.multi_hop", "make_multi_hop"),
    "python_tests": ("megarl.tasks.python_tests", "make_python_tests"),
    "reasoning_gym": ("megarl.tasks.reasoning_gym", "make_reasoning_gym"),
    "tool_calls": ("megarl.tasks.tool_calls", "make_tool_calls"),
}
"""Name -> (module, function that takes the arguments and makes the verifier); the module also has `check_examples`."""

PURE = frozenset({"countdown", "maze", "multi_hop", "tool_calls"})
"""Verifiers without side effects whose time is bounded by the length of the response: they need no process of their own."""


def make_verifier(name: str, args: dict[str, Any] | None = None) -> Verifier:
    """The verifier `name` of a recipe with its arguments; InputError for an unknown name, import path or argument."""
    args = dict(args or {})
    if name in BUILTIN:
        module, factory = BUILTIN[name]
        make = getattr(importlib.import_module(module), factory)
        known = inspect.signature(make).parameters
        for key in args:
            if key not in known:
                raise InputError(f'verifier.args: "{name}" has no argument "{key}"{nearest(key, known)}')
        return make(**args)
    if ":" not in name:
        raise InputError(
            f'verifier.name: "{name}" is not known{nearest(name, BUILTIN)} Your own is named by its import path, package.module:function.'
        )
    function = _import_function(name)
    try:
        inspect.signature(function).bind("", None, {}, **args)
    except TypeError as error:
        raise InputError(f"verifier.args: {name} cannot be called as function(response, answer, metadata, **args): {error}.") from None
    except ValueError:  # a builtin without a signature: the first call will show
        pass
    return lambda response, example: _as_verdict(function(response, example.answer, example.metadata, **args))


def check_examples(name: str, examples: Sequence[Example]) -> None:
    """InputError for the first example that a built-in verifier cannot judge, so that a run stops before it starts."""
    if name in BUILTIN:
        importlib.import_module(BUILTIN[name][0]).check_examples(examples)


def judge(verifier: Verifier, responses: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
    """One verdict per response, in order. A verifier that raises, or whose reward is no finite number, gives `crash` with reward 0.

    InputError is not caught: the data line is wrong, not the verifier.
    """
    if len(responses) != len(examples):
        raise ValueError(f"{len(responses)} responses for {len(examples)} examples")
    return [judge_one(verifier, response, example) for response, example in zip(responses, examples, strict=True)]


def judge_one(verifier: Verifier, response: str, example: Example) -> Verdict:
    """The verdict on one response, by the rules of `judge`."""
    try:
        verdict = verifier(response, example)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever the verifier fails with is a fact about the verifier
        return Verdict("crash", 0.0, detail=f"{type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
        return Verdict("crash", 0.0, detail=f"returned {type(verdict).__name__}, expected a Verdict")
    if not _is_number(verdict.reward) or not math.isfinite(verdict.reward):
        return Verdict("crash", 0.0, verdict.extracted, f"reward {verdict.reward!r} is not a finite number")
    if verdict.vector is not None and not _is_matrix(verdict.vector):
        return Verdict("crash", 0.0, verdict.extracted, f"vector {verdict.vector!r} is no matrix of finite numbers", vector=())
    return verdict


def _as_verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if not _is_number(result):
        raise TypeError(f"the verifier returned {type(result).__name__}, expected a number or a Verdict")
    return Verdict("ok" if result >= 1 else "wrong", float(result))


def _is_number(value: Any) -> bool:
    """Python's and numpy's numbers; True and False stand for 1 and 0."""
    return isinstance(value, Real) or type(value).__name__ == "bool"


def _is_matrix(rows: Any) -> bool:
    """Whether `rows` are sequences of the same number of finite numbers."""
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) and len(row) == len(rows[0]) > 0 for row in rows):
        return False
    return all(_is_number(x) and math.isfinite(x) for row in rows for x in row)


def _import_function(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InputError(f'verifier.name: "{path}" is no import path; expected package.module:function.')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f'verifier.name: "{path}": no module "{error.name}"; install it or add its folder to PYTHONPATH.') from None
    except (Exception, SystemExit) as error:  # the user's module may fail with anything while it is imported
        raise InputError(f'verifier.name: "{path}": importing it fails ({type(error).__name__}: {error}).') from error
    if not hasattr(module, attribute):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(f'verifier.name: "{path}": {module_name} has no "{attribute}"{nearest(attribute, functions)}')
    function = getattr(module, attribute)
    if not callable(function):
        raise InputError(f'verifier.name: "{path}" is a {type(function).__name__}, expected a function.')
    return function
