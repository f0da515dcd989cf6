"""Promise: a data file is read completely and exactly, or refused with one message that names the file and the line."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example, fingerprint, read_examples, write_jsonl

GOOD = '{"prompt": "1+1=", "answer": 2}'


def write(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def test_reads_every_field_and_fills_in_the_optional_ones(tmp_path):
    full = {
        "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
        "answer": {"any": [1, None, 2.5]},
        "metadata": {"numbers": [1, 2]},
        "id": "first",
        "demonstrations": ["a", "b"],
    }
    path = write(tmp_path, json.dumps(full), GOOD, '{"prompt": "p", "answer": null, "metadata": null, "id": null, "demonstrations": null}')
    assert read_examples(path) == [
        Example("first", full["prompt"], full["answer"], {"numbers": [1, 2]}, ("a", "b")),
        Example("data:2", "1+1=", 2, {}, ()),
        Example("data:3", "p", None, {}, ()),
    ]


def test_blank_lines_are_skipped_and_still_counted(tmp_path):
    path = write(tmp_path, "", GOOD, "  \t", "", GOOD, "", "nonsense")
    with pytest.raises(InputError, match=r"data\.jsonl: line 7: not JSON"):
        read_examples(path)
    assert [example.id for example in read_examples(write(tmp_path, "", GOOD, "  ", GOOD))] == ["data:2", "data:4"]


def test_line_ends_and_marks_of_other_systems(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + '{"prompt": "a\u2028b", "answer": 1}'.encode())
    assert [(example.id, example.prompt) for example in read_examples(path)] == [("windows:1", "1+1="), ("windows:2", "a\u2028b")]


MALFORMED = {
    "{'prompt': 1}": "not JSON .*column 2",
    '{"prompt": "p", "answer": 1': "not JSON",
    '{"prompt": "p", "answer": 1} {}': "not JSON .*Extra data",
    '"text"': "expected an object .* got a string",
    "[1]": "expected an object .* got a list",
    "null": "expected an object .* got null",
    '{"answer": 1}': "`prompt` is missing",
    '{"prompt": "p"}': "`answer` is missing",
    '{"prompt": "p", "answer": 1, "promt": "x"}': 'unknown key "promt"; did you mean "prompt"',
    '{"prompt": "p", "answer": 1, "zzz": "x"}': 'unknown key "zzz"; known: answer, demonstrations, id, metadata, prompt',
    '{"prompt": "p", "prompt": "q", "answer": 1}': 'key "prompt" is given twice',
    '{"prompt": 5, "answer": 1}': "`prompt` must be a string or a list of messages, got a number",
    '{"prompt": null, "answer": 1}': "`prompt` must be .* got null",
    '{"prompt": "", "answer": 1}': "`prompt` is empty",
    '{"prompt": "  \\n", "answer": 1}': "`prompt` is empty",
    '{"prompt": [], "answer": 1}': "`prompt` is empty",
    '{"prompt": ["hi"], "answer": 1}': "message 1 of `prompt` must be an object with `role` and `content`, got a string",
    '{"prompt": [{"role": "user", "content": "a"}, {"content": "b"}], "answer": 1}': "message 2 of `prompt`: `role` is missing",
    '{"prompt": [{"role": "user"}], "answer": 1}': "message 1 of `prompt`: `content` is missing",
    '{"prompt": [{"role": "user", "content": null}], "answer": 1}': "message 1 of `prompt`: `content` must be a string, got null",
    '{"prompt": [{"role": "", "content": "a"}], "answer": 1}': "message 1 of `prompt`: `role` is empty",
    '{"prompt": [{"role": "user", "content": "a", "rol": 1}], "answer": 1}': 'unknown key "rol"; did you mean "role"',
    '{"prompt": [{"role": "user", "content": " "}], "answer": 1}': "`prompt` is empty",
    '{"prompt": "p", "answer": 1, "metadata": [1]}': "`metadata` must be an object, got a list",
    '{"prompt": "p", "answer": 1, "id": 7}': "`id` must be a non-empty string, got a number",
    '{"prompt": "p", "answer": 1, "id": ""}': "`id` must be a non-empty string, got an empty string",
    '{"prompt": "p", "answer": 1, "demonstrations": "a"}': "`demonstrations` must be a list of strings, got a string",
    '{"prompt": "p", "answer": 1, "demonstrations": ["a", 2]}': "demonstration 2 must be a non-empty string, got a number",
    '{"prompt": "p", "answer": 1, "demonstrations": [""]}': "demonstration 1 must be a non-empty string, got an empty string",
    '{"prompt": "p", "answer": NaN}': "NaN is not a JSON number",
    '{"prompt": "p", "answer": [-Infinity]}': "-Infinity is not a JSON number",
    '{"prompt": "p", "answer": 1e999}': "1e999 is too large",
    '{"prompt": "p", "answer": "\\ud800"}': "`answer` holds half of a surrogate pair",
    '{"prompt": "p", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}": "nested too deeply",
    '{"prompt": "p", "answer": ' + "9" * 5000 + "}": "limit",
    b'{"prompt": "\xff", "answer": 1}': r"not UTF-8 \(byte 13 of the line",
}


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_line_is_named(tmp_path, line):
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(InputError, match=MALFORMED[line]) as caught:
        read_examples(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_any_depth_is_read_or_refused(tmp_path, depth):
    path = write(tmp_path, '{"prompt": "p", "answer": ' + "[" * depth + "]" * depth + "}")
    try:
        assert len(read_examples(path)) == 1
    except InputError as error:
        assert "line 1: nested too deeply" in str(error)


def test_duplicate_ids_name_both_lines(tmp_path):
    path = write(tmp_path, '{"prompt": "p", "answer": 1, "id": "x"}', "", GOOD, '{"prompt": "q", "answer": 1, "id": "x"}')
    with pytest.raises(InputError, match=r'data.jsonl: line 1 and .*data.jsonl: line 4 have the same id "x"'):
        read_examples(path)
    path = write(tmp_path, '{"prompt": "p", "answer": 1, "id": "data:2"}', GOOD)
    with pytest.raises(InputError, match=r'line 1 and .*line 2 have the same id "data:2"'):
        read_examples(path)


def test_files_that_cannot_be_data(tmp_path):
    for content in (b"", b"\n \n"):
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"empty.jsonl: holds no examples"):
            read_examples(path)
    with pytest.raises(InputError, match=r"nowhere.jsonl: no such file"):
        read_examples(tmp_path / "nowhere.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputError, match=r"folder.jsonl: is a folder without data files"):
        read_examples(tmp_path / "folder.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"pipe.jsonl: is a pipe or device, expected a data file"):
        read_examples(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"data.csv: expected a file that ends in .jsonl, .parquet, .arrow"):
        read_examples(write(tmp_path, GOOD, name="data.csv"))


def test_write_then_read_gives_the_same(tmp_path):
    rows = [{"prompt": "é×\n\u2028", "answer": [1, 2.5, None]}, {"prompt": "b", "answer": True, "id": "x", "demonstrations": ["y"]}]
    assert write_jsonl(tmp_path / "out.jsonl", rows) == 2
    assert [(e.prompt, e.answer, e.demonstrations) for e in read_examples(tmp_path / "out.jsonl")] == [
        ("é×\n\u2028", [1, 2.5, None], ()),
        ("b", True, ("y",)),
    ]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(ValueError):
        write_jsonl(path, [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": float("nan")}])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_fingerprint_is_that_of_the_content(tmp_path):
    a, b, c = (write(tmp_path, line, name=name) for line, name in ((GOOD, "a.jsonl"), (GOOD, "b.jsonl"), (GOOD + " ", "c.jsonl")))
    assert fingerprint(a) == fingerprint(b) != fingerprint(c)
    with pytest.raises(InputError, match=r"no such file"):
        fingerprint(tmp_path / "nowhere.jsonl")


def parquet(tmp_path, table):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def test_parquet_gives_what_json_lines_give(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i, "metadata": {"numbers": [i, 2]}, "id": None, "demonstrations": ["d"]} for i in range(5)]
    examples = read_examples(parquet(tmp_path, pyarrow.Table.from_pylist(rows)))
    assert [(e.id, e.prompt, e.answer, e.metadata, e.demonstrations) for e in examples] == [
        (f"data:{i + 1}", f"p{i}", i, {"numbers": [i, 2]}, ("d",)) for i in range(5)
    ]
    chat = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "a"}]
    assert read_examples(parquet(tmp_path, pyarrow.Table.from_pylist(chat)))[0].prompt == chat[0]["prompt"]


def test_malformed_parquet_names_the_row(tmp_path):
    import datetime

    def refused(rows, message, schema=None):
        with pytest.raises(InputError, match=message):
            read_examples(parquet(tmp_path, pyarrow.Table.from_pylist(rows, schema=schema)))

    refused(
        [{"prompt": "p", "answer": 1}, {"prompt": "p", "answer": 2}, {"prompt": "", "answer": 1}], r"data.parquet: row 3: `prompt` is empty"
    )
    refused([{"prompt": "p", "answer": 1.0}, {"prompt": "p", "answer": float("nan")}], "row 2: `answer` is nan")
    refused([{"prompt": "p", "answer": datetime.date(2020, 1, 1)}], "row 1: `answer` holds a date")
    refused([{"prompt": "p", "answer": b"x"}], "row 1: `answer` holds a bytes")
    refused([{"prompt": "p", "answer": 1, "id": "x"}] * 2, 'row 1 and .*row 2 have the same id "x"')
    refused([{"prompt": "p", "reward_model": 1}], 'row 1: unknown key "reward_model"')
    refused([], "holds no examples", pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.int64())]))
    twice = pyarrow.Table.from_arrays([pyarrow.array(["p"]), pyarrow.array(["q"])], names=["prompt", "prompt"])
    with pytest.raises(InputError, match=r"two columns have the same name"):
        read_examples(parquet(tmp_path, twice))


def test_what_is_not_parquet_is_refused(tmp_path):
    path = write(tmp_path, GOOD, name="data.parquet")
    with pytest.raises(InputError, match=r"data.parquet: not a Parquet file"):
        read_examples(path)
    whole = parquet(tmp_path, pyarrow.Table.from_pylist([{"prompt": f"p{i}" * 50, "answer": i} for i in range(50)])).read_bytes()
    damaged = bytearray(whole)
    damaged[200:2000] = b"\xff" * 1800
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(InputError, match=r"damaged.parquet: "):
        read_examples(tmp_path / "damaged.parquet")
