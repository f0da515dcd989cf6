"""`megarl convert`: into Megatron's format and back changes no bit, under any layout, and says what is wrong with a folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.system.conftest import megarl_here

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "model, there, back",
    [
        ("qwen3_tied", ("--tensor", "2"), ("--pipeline", "2")),
        ("llama_untied", (), ("--tensor", "2", "--pipeline", "2")),
        ("experts", ("--expert", "2"), ("--tensor", "2")),
    ],
)
def test_there_and_back(tiny_models, tmp_path, model, there, back):
    said = megarl_here("convert", tiny_models[model], "--output", tmp_path / "megatron", *there).stdout
    assert "Megatron folder" in said and not list((tmp_path / "megatron").glob("*.safetensors"))
    megarl_here("convert", tmp_path / "megatron", "--output", tmp_path / "back", *back)
    want, got = (load_file(folder / "model.safetensors") for folder in (tiny_models[model], tmp_path / "back"))
    assert want.keys() == got.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((tiny_models[model] / "config.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


def test_weights_keep_their_precision(tiny_models, tmp_path):
    shutil.copytree(tiny_models["qwen2_tied"], tmp_path / "model")
    want = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model/model.safetensors").items()}
    save_file(want, tmp_path / "model/model.safetensors")
    megarl_here("convert", tmp_path / "model", "--output", tmp_path / "megatron")
    megarl_here("convert", tmp_path / "megatron", "--output", tmp_path / "back")
    got = load_file(tmp_path / "back/model.safetensors")
    assert all(got[name].dtype == torch.bfloat16 and torch.equal(got[name], tensor) for name, tensor in want.items())


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tiny_models, tmp_path):
    megarl_here("convert", tiny_models["qwen3_tied"], "--output", tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron", tmp_path / "damaged")
    for part in (tmp_path / "damaged/megatron").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    shutil.copytree(tmp_path / "megatron", tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty/megatron")
    (tmp_path / "empty/megatron").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for source, options, named in (
        ("nowhere", (), "no such folder"),
        ("damaged", (), "cannot be loaded"),
        ("empty", (), "no whole checkpoint"),
        ("megatron", ("--tensor", "3"), "training.layout.tensor"),
    ):
        done = megarl_here("convert", tmp_path / source, "--output", tmp_path / "new", *options, check=2)
        assert named in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = megarl_here("convert", tmp_path / "megatron", "--output", tmp_path / "damaged", check=2)
    assert "exists already" in done.stderr
    assert before == sorted(path.name for path in tmp_path.iterdir())
