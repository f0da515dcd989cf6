"""Promise: one graded line for each line, in order; a bad line is named, and nothing half-written stays."""

import json
from pathlib import Path

import pytest

from megarl.cli import main


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def write(*rows):
        Path("in.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")

    return write


def grade(*arguments):
    return main(["grade", "in.jsonl", "--output", "out.jsonl", "--verifier", *arguments])


def rows():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_a_graded_line_for_each_line(write, capsys):
    numbers = {"numbers": [1, 2, 3]}
    write(
        {"response": "1+2+3", "answer": 6, "metadata": numbers, "id": "first", "model": "m"},
        "",
        {"response": "1+2", "answer": 6, "metadata": numbers},
        {"response": "six", "answer": 6, "metadata": numbers},
    )
    assert grade("countdown", "--set", "format=plain", "--set", "components=true") == 0
    reasons = ["", "uses [1, 2], expected each of [1, 2, 3] once", "'s' is not part of an expression"]
    assert rows() == [
        {"id": "first", "verdict": "ok", "reward": 1.0, "extracted": "1+2+3", "detail": reasons[0], "vector": [[1.0, 1.0, 1.0]]},
        {"verdict": "wrong", "reward": 0.0, "extracted": "1+2", "detail": reasons[1], "vector": [[1.0, 0.0, 0.0]]},
        {"verdict": "unparseable", "reward": 0.0, "extracted": None, "detail": reasons[2], "vector": [[0.0, 0.0, 0.0]]},
    ]
    assert capsys.readouterr().out.split() == ["ok", "1", "33.3%", "wrong", "1", "33.3%", "unparseable", "1", "33.3%"]


def test_your_own_verifier_in_the_pool(write, capsys):
    write(*({"response": text, "answer": None} for text in ("1", "hang", "exits", "0.5")))
    assert grade("my_hostile_verifiers:verify", "--timeout-s", "0.3", "--workers", "2", "--set", "work_s=0.001") == 0
    assert [(row["verdict"], row["reward"]) for row in rows()] == [("ok", 1.0), ("timeout", 0.0), ("crash", 0.0), ("wrong", 0.5)]
    assert "timeout" in capsys.readouterr().out


GOOD = {"response": "1+2", "answer": 3, "metadata": {"numbers": [1, 2]}}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "in.jsonl: line 2: not JSON"),
        ("[1]", "in.jsonl: line 2: expected an object with `response` and `answer`"),
        ({"answer": 3}, "in.jsonl: line 2: `response` is missing"),
        ({"response": "1"}, "in.jsonl: line 2: `answer` is missing"),
        ({"response": 1, "answer": 3}, "in.jsonl: line 2: `response` must be a string"),
        ({"response": "1", "answer": 3, "metadata": []}, "in.jsonl: line 2: `metadata` must be an object"),
        ({"response": "1", "answer": 3}, "in.jsonl: line 2: countdown needs `metadata.numbers`"),
    ],
)
def test_a_bad_line_is_named_and_nothing_stays(write, capsys, bad, message):
    write(GOOD, bad)
    assert grade("countdown") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl"]


def test_wrong_data_found_by_your_own_verifier(write, capsys):
    write({"response": "1", "answer": 0}, {"response": "bad_data", "answer": 0})
    assert grade("my_hostile_verifiers:verify") == 2
    assert 'example "a": is wrong.' in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl"]


def test_other_mistakes(write, capsys):
    write(GOOD)
    for arguments, message in (
        (("cuntdown",), 'did you mean "countdown"'),
        (("countdown", "--set", "formt=plain"), 'has no argument "formt"'),
        (("countdown", "--set", "format"), "format: expected key=value"),
        (("countdown", "--set", "format=*a"), "an alias"),
    ):
        assert grade(*arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["grade", "none.jsonl", "--output", "out.jsonl", "--verifier", "math"]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
    assert main(["grade", "in.jsonl", "--output", "in.jsonl", "--verifier", "countdown"]) == 2
    assert "in.jsonl exists already" in capsys.readouterr().err
    assert main(["grade", "in.jsonl", "--output", "no/out.jsonl", "--verifier", "countdown"]) == 2
    assert "there is no folder no" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        grade("countdown", "--workers", "0")
