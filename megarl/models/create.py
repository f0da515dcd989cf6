"""Models made from nothing, for tests and for the quick start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megarl.errors import InputError

TINY_CHARACTERS = "0123456789 =:+-*/()SEGDXULR"
TINY_VOCABULARY = 32
PAD, EOS = 0, 1


def create_model(preset: str, output: str | Path, seed: int = 0) -> int:
    """Write a freshly initialised model with its tokenizer as the Hugging Face folder `output`; returns the number of parameters.

    `tiny-qwen3`: the quick-start model, a Qwen3 of 0.86M parameters that reads and writes single characters: arithmetic, and
    the objects and moves of `megarl create data maze`.
    The folder must be new or empty; it appears only when it is complete. The same seed gives the same weights.
    """
    presets: dict[str, Callable[[Path, int], int]] = {"tiny-qwen3": _tiny_qwen3}
    if preset not in presets:
        raise InputError(f'no model preset "{preset}"; known: {", ".join(sorted(presets))}')
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed must be an integer from 0 to below 2**63, got {seed!r}")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already; remove it or choose another folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        count = presets[preset](temporary, seed)
        temporary.replace(folder)
        return count
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tiny_qwen3(folder: Path, seed: int) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, rope_theta=10000.0, initializer_range=0.02,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config.update(do_sample=True, temperature=1.0, pad_token_id=PAD, eos_token_id=EOS)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def character_tokenizer():
    """The tokenizer of `tiny-qwen3`: one token per character of TINY_CHARACTERS, from id 2 on.

    It adds no special tokens and has no unknown token: a text with another character is refused. Ids without a character are spelled
    <unused..>, so that a model that emits one is seen to do so.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *TINY_CHARACTERS]
    tokens += [f"<unused{index}>" for index in range(len(tokens), TINY_VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)
