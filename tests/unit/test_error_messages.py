"""Promise: every message about bad input is a sentence, in every room alike."""

import ast
from pathlib import Path

import pytest

import megarl
from megarl.errors import sentence

ROOT = Path(megarl.__file__).parent
# `Loaded.naming` makes sentences of what `objectives` refuses; `models` has some to be mended.
FILES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("objectives", "models"))
# Functions whose result ends as a sentence.
SENTENCES = ("nearest(", "_message(", "_refusal(", "sentence(")


def endings(path: Path) -> list[tuple[int, str]]:
    """(line, last part of the message) of every InputError made in the file: its text, or the code of the expression that it ends in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "InputError":
            last = node.args[0].values[-1] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            found.append((node.lineno, last.value if isinstance(last, ast.Constant) else ast.unparse(last).lstrip("{")))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_end_with_a_full_stop(path):
    ends = lambda text: text.endswith((".", "?")) or text.startswith(SENTENCES)
    assert not [f"line {line}: {text!r}" for line, text in endings(path) if not ends(text)]


def test_the_check_sees_a_message_without_one(tmp_path):
    (tmp_path / "x.py").write_text('raise InputError(f"{a}: b {c}")\nraise InputError("d.")\nraise InputError(f"{a}{nearest(a, b)}")\n')
    assert endings(tmp_path / "x.py") == [(1, "c}"), (2, "d."), (3, "nearest(a, b)}")]


def test_sentence():
    assert [sentence(text) for text in ("a", "a.", "a?")] == ["a.", "a.", "a?"]
