"""A damaged file in a run folder is named, or does not matter; it is never a traceback."""

import json

import pytest

from megarl.errors import InputError
from megarl.observe.metrics import read_metrics
from megarl.observe.run_folder import RunFolder


@pytest.mark.parametrize("line", ['{"step": 1, "a": ' + "9" * 401 + "}", '{"step": true}', '{"step": 1, "a": "x"}', "[" * 100_000, "[1]"])
def test_bad_lines_are_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:1"):
        read_metrics(path)


@pytest.mark.parametrize("said", ["x", [1], None])
def test_an_unknown_nonfinite_value_is_nan(tmp_path, said):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "a": None, "a/nonfinite": said}) + "\n")
    assert read_metrics(path)[0]["a"] != read_metrics(path)[0]["a"]


def test_a_folder_in_the_place_of_the_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("text", ["{", "[1]", '{"earlier_starts": 5}'])
def test_a_damaged_environment_does_not_keep_a_run_from_going_on(tmp_path, text):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.environment.write_text(text)
        folder.write_environment(0, "recipe.yaml")
        assert json.loads(folder.environment.read_text())["earlier_starts"] == ["unreadable"]


def test_a_name_that_no_file_system_takes():
    with pytest.raises(InputError, match="cannot be used"):
        RunFolder("x" * 300).refuse_used()


def test_a_file_in_the_place_of_a_subfolder(tmp_path):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_recipe("")
    folder.rollouts.rmdir()
    folder.rollouts.write_text("")
    for _ in range(2):  # the lock is given back
        with pytest.raises(InputError, match="cannot be written"):
            RunFolder.open(tmp_path / "run")
