"""What a resumed run may change in its recipe."""

from __future__ import annotations

import os
from typing import Any

from megarl.config.fields import dotted
from megarl.config.load import leaves, plain
from megarl.config.recipe import Recipe
from megarl.config.show import inline

# The steps before the checkpoint would have been others.
FIXED = (
    *("seed", "model", "data.train", "data.chat", "data.shuffle", "rollout.prompts_per_step", "rollout.responses_per_prompt"),
    "replay",  # a checkpoint holds the groups that were kept
    "training.optimizer.distributed",  # its state is laid out in another way
)
_PATHS = ("output", "model.path", "data.train", "data.evaluation")
_UNSET = object()


def changes(before: Recipe, now: Recipe) -> tuple[list[str], list[str]]:
    """(what a resumed run must not change, what it may), each as `training.steps 60 -> 100`, in the order of the recipe.

    Paths are the same if they lead to the same place; a relative one is read from the present working directory in both recipes.
    """
    old, new = ({dotted(path): value for path, value in leaves(plain(recipe))} for recipe in (before, now))
    refused, allowed = [], []
    for key in dict.fromkeys([*old, *new]):
        was, is_ = old.get(key, _UNSET), new.get(key, _UNSET)
        if not _same(key, was, is_):
            (refused if _under(key, FIXED) else allowed).append(f"{key} {_text(was)} -> {_text(is_)}")
    return refused, allowed


def _same(key: str, was: Any, is_: Any) -> bool:
    if _under(key, _PATHS) and isinstance(was, str) and isinstance(is_, str):
        return os.path.realpath(was) == os.path.realpath(is_)
    return was == is_


def _under(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _text(value: Any) -> str:
    return "unset" if value is _UNSET else inline(value)
