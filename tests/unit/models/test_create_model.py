"""Promise: `tiny-qwen3` is an ordinary Hugging Face folder of the published shape, the same for the same seed, complete or absent."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.errors import InputError
from megarl.models.create import TINY_CHARACTERS, create_model
from megarl.tasks.create import tiny_instances
from megarl.tasks.prompts import eos_token_ids, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert create_model("tiny-qwen3", folder, seed=3) == 857_472
    return folder


def test_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "qwen3", "vocab_size": 32, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "initializer_range": 0.02, "dtype": "float32",
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    assert eos_token_ids(folder, 32) == (1,)


def test_any_tool_can_load_and_run_it(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 857_472
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.018 < model.model.embed_tokens.weight.std().item() < 0.022
    with torch.no_grad():
        logits = model(**tokenizer("5 18 13=36:", return_tensors="pt")).logits
    assert logits.shape == (1, 11, 32) and logits.isfinite().all()


def test_tokenizer_is_one_token_per_character(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer(TINY_CHARACTERS)["input_ids"] == list(range(2, 2 + len(TINY_CHARACTERS)))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 32)
    for text in (TINY_CHARACTERS, "5 18 13=36:", " 1  +2"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.decode([7, 2, 1, 0], skip_special_tokens=True) == "50"
    # an id without a character is visible in the text, so that no verifier takes it for nothing
    assert tokenizer.decode([7, 31, 2], skip_special_tokens=True) == "5<unused31>0"
    with pytest.raises(Exception, match=r"UNK"):
        tokenizer("5 x")


def test_the_longest_line_of_the_quick_start_fits(folder):
    tokenizer = load_tokenizer(folder)
    _, expressions = tiny_instances()
    longest = max((text for texts in expressions.values() for text in texts), key=len)
    assert len(tokenizer(longest)["input_ids"]) == 8
    assert len(tokenizer("20 19 18=57:")["input_ids"]) == 12


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    create_model("tiny-qwen3", tmp_path / "same", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    create_model("tiny-qwen3", tmp_path / "other", seed=4)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "same", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]


def test_an_existing_folder_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"model exists already; remove it or choose another folder"):
        create_model("tiny-qwen3", tmp_path / "model")
    with pytest.raises(InputError, match=r"mine exists already"):
        create_model("tiny-qwen3", tmp_path / "model" / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


def test_an_empty_folder_is_filled(tmp_path):
    create_model("tiny-qwen3", tmp_path, seed=3)
    assert (tmp_path / "model.safetensors").is_file()


def test_bad_arguments(tmp_path):
    with pytest.raises(InputError, match=r'no model preset "tiny"; known: tiny-qwen3'):
        create_model("tiny", tmp_path / "model")
    for seed in (-1, 0.5, True, 2**63):
        with pytest.raises(InputError, match=r"seed must be"):
            create_model("tiny-qwen3", tmp_path / "model", seed=seed)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    """The disk is full while the tokenizer is written."""
    from transformers import PreTrainedTokenizerFast

    def full(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(InputError, match=r"cannot be written .No space left on device"):
        create_model("tiny-qwen3", tmp_path / "model")
    assert not list(tmp_path.iterdir())
