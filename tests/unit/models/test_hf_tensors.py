import json

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import InputError
from megarl.models.hf_config import read_model_shape
from megarl.models.hf_folder import write_hf_folder
from megarl.models.hf_tensors import HFTensors, check_weights, hf_shapes
from tests.unit.models.test_hf_config import EXPERTS
from tests.unit.models.test_hf_config import folder as config_folder


@pytest.fixture
def folder(tmp_path):
    path = config_folder(tmp_path)
    save_file({name: torch.randn(shape) for name, shape in hf_shapes(read_model_shape(path)).items()}, path / "model.safetensors")
    return path


def test_a_whole_folder_passes(folder):
    check_weights(folder, read_model_shape(folder))


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True), ("qwen3", True), ("qwen3", False)])
def test_the_names_and_shapes_are_those_of_transformers(tmp_path, family, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = config_folder(tmp_path, model_type=family, tie_word_embeddings=tied, head_dim=None if family == "qwen2" else 16)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == hf_shapes(read_model_shape(path))


def test_the_names_and_shapes_of_experts_are_those_that_transformers_writes(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = config_folder(tmp_path, **EXPERTS)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    check_weights(path, read_model_shape(path))
    assert set(HFTensors(path).files) == set(hf_shapes(read_model_shape(path)))


def test_no_weights(tmp_path):
    path = config_folder(tmp_path)
    with pytest.raises(InputError, match="has no weights"):
        check_weights(path, read_model_shape(path))


def test_a_missing_tensor_and_a_wrong_shape_are_named(folder):
    tensors = {name: HFTensors(folder)[name] for name in HFTensors(folder).files}
    shape = read_model_shape(folder)
    save_file({k: v for k, v in tensors.items() if "layers.3.mlp.up" not in k}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"no tensor model\.layers\.3\.mlp\.up_proj\.weight"):
        check_weights(folder, shape)
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \(3,\).*\(64,\)"):
        check_weights(folder, shape)


def test_weights_of_more_layers_than_the_config_says(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(InputError, match=r"model\.layers\.[45]\."):
        check_weights(folder, read_model_shape(folder))


def test_a_damaged_file(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        check_weights(folder, read_model_shape(folder))


def test_an_index_that_names_a_lost_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(InputError, match="files that are not there: model-00001"):
        HFTensors(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read"):
        HFTensors(folder)


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
def test_written_folders_read_back_the_same_in_one_file_or_many(folder, tmp_path_factory, shard_bytes):
    tensors = HFTensors(folder)
    written = tmp_path_factory.mktemp("written") / "model"
    write_hf_folder(((name, tensors[name]) for name in tensors.files), source=folder, folder=written, shard_bytes=shard_bytes)
    check_weights(written, read_model_shape(written))
    assert all(torch.equal(HFTensors(written)[name], tensors[name]) for name in tensors.files)
    assert ("model.safetensors.index.json" in {p.name for p in written.iterdir()}) == (shard_bytes < 1 << 30)


def test_an_interrupted_write_leaves_nothing(folder, tmp_path_factory):
    def broken():
        yield "a", torch.ones(2)
        raise RuntimeError("lost")

    parent = tmp_path_factory.mktemp("written")
    with pytest.raises(RuntimeError, match="lost"):
        write_hf_folder(broken(), source=folder, folder=parent / "model")
    assert list(parent.iterdir()) == []
