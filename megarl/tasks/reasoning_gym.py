"""Procedural tasks of the package `reasoning-gym`, judged by its own scorers.

An example has `metadata.dataset` (name of the data set), `metadata.entry` (the generated entry: question, answer, metadata) and, where the
data set was not created with its default settings, `metadata.config`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, get_args

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.extract import AnswerFormat, check_format, extract_answer
from megarl.tasks.names import nearest
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

RUNS_CODE = frozenset(
    [
        "binary_matrix",
        "bitwise_arithmetic",
        "codeio",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ]
)
"""Data sets that pass a model's answer, or text of the data file, to eval, exec or sympy's parser (`composite` can reach all of them):
any program could be in it, so they are refused."""


def make_reasoning_gym(format: AnswerFormat = "tagged") -> Verifier:
    """The verifier `reasoning_gym`: the reward is the scorer's score, `ok` is a score of 1.

    format: `tagged` (the last <answer>...</answer>), `plain` (the whole response) or `last_number` (in it).
    """
    check_format(format, get_args(AnswerFormat))

    def verify(response: str, example: Example) -> Verdict:
        name, entry, config = read_task(example)
        answer = extract_answer(response, format)
        if answer is None:
            return Verdict("unparseable", 0.0, detail="no answer")
        score = float(_scorer(name, json.dumps(config, sort_keys=True))(answer, entry))
        return Verdict("ok" if score == 1.0 else "wrong", score, answer)

    return verify


def read_task(example: Example) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(data set, entry, settings) of an example; InputError naming its id if one is missing or not known."""
    place = f'example "{example.id}"'
    name, entry, config = (example.metadata.get(key) for key in ("dataset", "entry", "config"))
    if not isinstance(name, str):
        raise InputError(f"{place}: reasoning_gym needs `metadata.dataset`, the name of a data set, got {name!r}.")
    check_dataset_name(name, place)
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        raise InputError(f"{place}: reasoning_gym needs `metadata.entry` with `question`, `answer` and `metadata`.")
    if config is not None and not isinstance(config, dict):
        raise InputError(f"{place}: `metadata.config` must be an object, got {config!r}.")
    return name, entry, config or {}


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `reasoning_gym` cannot judge."""
    checked: set[tuple[str, str]] = set()
    for example in examples:
        name, _, config = read_task(example)
        key = (name, json.dumps(config, sort_keys=True))
        if key not in checked:
            create_dataset(name, config, f'example "{example.id}"')
            checked.add(key)


def check_dataset_name(name: str, place: str) -> None:
    """InputError if there is no such data set or if it cannot be used safely."""
    datasets = load_package(place).factory.DATASETS
    if name not in datasets:
        raise InputError(f'{place}: reasoning-gym has no data set "{name}"{nearest(name, set(datasets) - RUNS_CODE)}')
    if name in RUNS_CODE:
        instead = "; use the task and verifier `countdown` instead" if name == "countdown" else ""
        raise InputError(f'{place}: reasoning-gym\'s "{name}" runs text of answers or data as code and is refused{instead}.')


def create_dataset(name: str, config: dict[str, Any], place: str) -> Any:
    """The data set with these settings; InputError for settings that it does not know or does not allow."""
    package = load_package(place)
    check_dataset_name(name, place)
    known = package.factory.DATASETS[name][1].__dataclass_fields__
    for key in config:
        if key not in known:
            raise InputError(f'{place}: reasoning-gym\'s "{name}" has no setting "{key}"{nearest(key, known)}')
    try:
        return package.create_dataset(name, **config)
    except Exception as error:  # mostly assertions of the package
        raise InputError(f'{place}: reasoning-gym\'s "{name}" refuses its settings ({error or type(error).__name__}).') from None


def load_package(place: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise InputError(f"{place}: needs the package reasoning-gym ({error}); install it with pip.") from None
    return reasoning_gym


@functools.lru_cache(maxsize=256)
def _scorer(name: str, config: str) -> Any:
    return create_dataset(name, json.loads(config), "metadata").score_answer
