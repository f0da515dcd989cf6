"""Files for the recipe tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MINIMAL = """\
output: run
model: {path: model}
data: {train: train.jsonl}
verifier: {name: countdown}
objective: {name: grpo}
training: {steps: 5}
"""


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[[str, str | bytes], str]:
    """Writes a file into the current folder, which is empty at first, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_file


@pytest.fixture
def minimal(write) -> str:
    """The shortest recipe there is."""
    return write("minimal.yaml", MINIMAL)


@pytest.fixture
def minimal_text() -> str:
    return MINIMAL
