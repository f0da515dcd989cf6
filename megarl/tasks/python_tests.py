"""Python programs against tests, in a sandbox.

An example has `metadata.tests`, a list in which each test is one of

* {"stdin": text, "stdout": text}: the program is run as a script; output is compared line by line, without white space at the ends;
* {"call": "f" or "Solution().f", "args": [...], "kwargs": {...}, "expect": value}: a call and the JSON value that it must return;
* text: Python statements that call the program's functions, such as "assert f(2) == 4"; `metadata.test_setup` comes before each.

The tests run in a process of their own: the program returns values to it and can do nothing else to it (`sandbox_runner`). So functions
that text tests call take and give plain data: numbers, text, lists, tuples, dicts, sets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any, Literal, get_args

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import check_format
from megarl.tasks.sandbox import Limits, Mode, Sandbox
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

CodeFormat = Literal["fenced", "plain"]
FENCE = re.compile(r"^```[ \t]*([A-Za-z0-9+_.-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = ("", "python", "python3", "py")
KEYS = ({"stdin", "stdout"}, {"call", "args", "expect"}, {"call", "args", "kwargs", "expect"})


def make_python_tests(
    format: CodeFormat = "fenced",
    reward: Literal["fraction", "all"] = "fraction",
    sandbox: Mode = "bubblewrap",
    time_s: float = 6.0,
    memory_mib: int = 512,
) -> Verifier:
    """The verifier `python_tests`.

    format: where the program is, `fenced` (the last ```python block) or `plain` (the whole response).
    reward: the `fraction` of tests passed, or 1 for `all` of them and else 0. The reward vector has 1 or 0 for each test.
    sandbox: `bubblewrap` (refused where it cannot run), or `rlimits`, which is no protection against a hostile program.
    time_s: for all tests of one response together; what is not done by then has failed. `verifier.timeout_s` must be above it.
    memory_mib: address space of the program.

    Verdicts: `ok` if all tests pass; `unparseable` without a program; `wrong` whatever else the program does: a program that hangs, ends
    early or eats memory fails its tests. `crash` only if the sandbox itself fails.
    """
    check_format(format, get_args(CodeFormat))
    for name, value, allowed in (("reward", reward, ("fraction", "all")), ("sandbox", sandbox, get_args(Mode))):
        if value not in allowed:
            raise InputError(f"verifier.args: {name} must be one of {', '.join(allowed)}, got {value!r}.")
    for name, value in (("time_s", time_s), ("memory_mib", memory_mib)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise InputError(f"verifier.args: {name} must be a number > 0, got {value!r}.")
    box = Sandbox(sandbox, Limits(time_s=float(time_s), memory_mib=int(memory_mib)))

    def verify(response: str, example: Example) -> Verdict:
        setup, tests = read_task(example)
        program = find_program(response, format)
        if program is None:
            return Verdict("unparseable", 0.0, detail="no program", vector=((0.0,) * len(tests),))
        results = run(box, program, setup, tests)
        passed = [float(result is True) for result in results]
        share = sum(passed) / len(passed)
        failed = next((i for i, result in enumerate(results) if result is not True), None)
        detail = "" if failed is None else f"test {failed + 1} of {len(tests)}: {results[failed]}"
        value = share if reward == "fraction" else float(share == 1)
        return Verdict("ok" if failed is None else "wrong", value, program, detail, (tuple(passed),))

    verify.time_s = float(time_s)
    return verify


def find_program(response: str, format: CodeFormat = "fenced") -> str | None:
    """The program in a response, None if there is none."""
    if format == "plain":
        return response if response.strip() else None
    blocks = [code for language, code in FENCE.findall(response) if language.lower() in PYTHON and code.strip()]
    return blocks[-1] if blocks else None


def run(box: Sandbox, program: str, setup: str, tests: list[Any]) -> list[bool | str]:
    """True, or why not, for each test. The tests that call functions share one run of the program, each script test has its own."""
    deadline = time.monotonic() + box.limits.time_s
    results: list[bool | str] = ["not done in time"] * len(tests)
    calls = [i for i, test in enumerate(tests) if not _is_script(test)]
    if calls:
        done = box.run_tests(program, setup, [tests[i] for i in calls], deadline)
        for i, result in zip(calls, done, strict=False):
            results[i] = result
    for i, test in enumerate(tests):
        if _is_script(test) and time.monotonic() < deadline:
            ran = box.run_script(program, test["stdin"], deadline)
            same = _lines(ran.output.decode("utf-8", "replace")) == _lines(test["stdout"])
            results[i] = ran.detail or (same or "another output")
    return results


def _is_script(test: Any) -> bool:
    return isinstance(test, dict) and "stdin" in test


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def read_task(example: Example) -> tuple[str, list[Any]]:
    """(setup, tests) of an example; InputError naming its id if they are not there."""
    place = f'example "{example.id}"'
    tests, setup = example.metadata.get("tests"), example.metadata.get("test_setup") or ""
    if not isinstance(tests, list) or not tests:
        raise InputError(f"{place}: python_tests needs `metadata.tests`, a list of tests, got {tests!r}.")
    if not isinstance(setup, str):
        raise InputError(f"{place}: `metadata.test_setup`, if given, must be Python text, got {setup!r}.")
    for number, test in enumerate(tests, start=1):
        is_call = isinstance(test, dict) and set(test) in KEYS[1:] and isinstance(test["call"], str) and isinstance(test["args"], list)
        is_script = isinstance(test, dict) and set(test) == KEYS[0] and all(isinstance(text, str) for text in test.values())
        if not is_call and not is_script and not _compiles(setup, test):
            raise InputError(
                f'{place}: test {number} must be {{"stdin", "stdout"}}, {{"call", "args", "expect"}} or Python text that compiles, '
                f"got {test!r}."
            )
    return setup, tests


def _compiles(setup: str, test: Any) -> bool:
    try:
        return isinstance(test, str) and bool(compile(f"{setup}\n{test}", "test", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `python_tests` cannot judge."""
    for example in examples:
        read_task(example)
