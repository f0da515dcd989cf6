"""Promise: files, patterns and folders of data sets are read in order and completely, or refused in one sentence."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megarl.errors import InputError
from megarl.tasks.data_files import find_files
from megarl.tasks.dataset import Example, read_examples


def table(*numbers):
    return pyarrow.table({"prompt": [f"p{n}" for n in numbers], "answer": list(numbers)})


def prompts(path):
    return [example.prompt for example in read_examples(path)]


def save_to_disk(folder, *tables):
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams, and their names in state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, part in zip(names, tables, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    save_to_disk(tmp_path / "set", table(3, 1), table(2))
    assert prompts(tmp_path / "set") == ["p3", "p1", "p2"]
    assert [e.id for e in read_examples(tmp_path / "set")] == ["data-00000-of-00002:1", "data-00000-of-00002:2", "data-00001-of-00002:1"]


def test_a_data_set_with_splits_names_them(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "set" / split, table(1))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"holds several splits; name one of them: .*set/test, .*set/train\.$"):
        read_examples(tmp_path / "set")
    assert prompts(tmp_path / "set" / "test") == ["p1"]


@pytest.mark.parametrize("where", [".", "data"])
def test_a_folder_of_parquet_files(tmp_path, where):
    folder = tmp_path / where
    folder.mkdir(exist_ok=True)
    for i in (1, 0):
        pyarrow.parquet.write_table(table(i, 10 + i), folder / f"train-{i:05d}-of-00002.parquet")
    (tmp_path / "README.md").write_text("about")
    assert prompts(tmp_path) == ["p0", "p10", "p1", "p11"]
    pyarrow.parquet.write_table(table(5), folder / "test-00000-of-00001.parquet")
    with pytest.raises(InputError, match=r"holds files of several splits; name one of them: .*test\*, .*train\*\.$"):
        read_examples(tmp_path)
    assert prompts(folder / "train-*") == ["p0", "p10", "p1", "p11"]


def test_what_is_no_data(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "is a folder without data files"),
        (tmp_path / "no-*", "no file has such a name"),
        (tmp_path / "none.parquet", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            find_files(path)
    for content in ("{", '{"_data_files": [1]}', "{}"):
        (tmp_path / "empty" / "state.json").write_text(content)
        with pytest.raises(InputError, match="is not what save_to_disk writes"):
            find_files(tmp_path / "empty")
    (tmp_path / "x.arrow").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"x\.arrow: not an Arrow stream"):
        read_examples(tmp_path / "x.arrow")


def test_columns_of_another_data_set(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "q", "truth": {"value": 3, "style": "rule"}, "level": 5, "metadata": {"own": 1}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "question", "answer": "truth.value"}
    assert read_examples(path, columns) == [Example("rows:1", "q", 3, {"level": 5, "metadata": {"own": 1}})]
    assert read_examples(path, columns | {"metadata": "metadata"}) == [Example("rows:1", "q", 3, {"level": 5, "own": 1})]
    with pytest.raises(InputError, match=r'rows\.jsonl: line 1: there is no column "quesion" for `prompt`; did you mean "question"\?'):
        read_examples(path, {"prompt": "quesion", "answer": "truth.value"})
    with pytest.raises(InputError, match=r'there is no column "truth.values" for `answer`'):
        read_examples(path, {"prompt": "question", "answer": "truth.values"})
    with pytest.raises(InputError, match=r'data\.columns: "anwser" is nothing that an example has; did you mean "answer"\?'):
        read_examples(path, {"anwser": "question"})
    with pytest.raises(InputError, match="`answer` is missing"):
        read_examples(path, {"prompt": "question"})
