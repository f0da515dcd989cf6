"""From examples to token ids, with the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.errors import InputError
from megarl.tasks.dataset import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]
    text: str
    """What was tokenised: the prompt as it is, or rendered by the chat template."""
    example: Example


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Nothing is downloaded, and no code from the folder is run."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder; expected a Hugging Face folder with a tokenizer")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{folder}: holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever the damaged file provokes
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({_reason(error)})") from None


def eos_token_ids(model_path: str | Path) -> tuple[int, ...]:
    """All ids that end a response, ascending: the union of generation_config.json, config.json and the tokenizer's own."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids.update(_eos_of_file(folder / name))
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        own = load_tokenizer(folder).eos_token_id
        ids.update([] if own is None else [own])
    if not ids:
        raise InputError(f"{folder}: no end-of-sequence token; set `eos_token_id` in its generation_config.json")
    return tuple(sorted(ids))


def _eos_of_file(file: Path) -> list[int]:
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from None
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise InputError(f"{file}: `eos_token_id` must be a token id or a list of them, got {json.dumps(value)}")
    return values


def tokenize(
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat: bool = False,
    too_long: Literal["error", "drop"] = "error",
) -> tuple[list[Prompt], int]:
    """(prompts in the order of the examples, number of those left out because they are too long).

    A list of messages, and with `chat` also a plain prompt (as one user message), is rendered once with the tokenizer's chat template, its
    generation prompt included; the template writes the special tokens, so none are added when the text is tokenised. Any other plain prompt
    is tokenised with the special tokens that the tokenizer itself adds (a BOS for Llama, none for Qwen), except an EOS at the end: the
    response must continue the prompt. `max_prompt_length` counts tokens, special ones included.

    Raises InputError with the id of the example: no chat template, template or tokenizer refuse it, no tokens, or too long with
    `too_long="error"`.
    """
    prompts: list[Prompt] = []
    dropped = 0
    for example in examples:
        text, token_ids = _encode(example, tokenizer, chat)
        if not token_ids:
            raise InputError(f'example "{example.id}": its prompt has no tokens')
        if len(token_ids) <= max_prompt_length:
            prompts.append(Prompt(example.id, tuple(token_ids), text, example))
        elif too_long == "drop":
            dropped += 1
        else:
            raise InputError(
                f'example "{example.id}": its prompt has {len(token_ids)} tokens, `data.max_prompt_length` is {max_prompt_length}; '
                "raise it or set `data.too_long: drop`"
            )
    if not prompts:
        raise InputError(f"no prompt is left: all {dropped} are longer than `data.max_prompt_length` ({max_prompt_length} tokens)")
    return prompts, dropped


def _encode(example: Example, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, list[int]]:
    rendered = chat or not isinstance(example.prompt, str)
    text = _render(example, tokenizer) if rendered else example.prompt
    try:
        token_ids = list(tokenizer(text, add_special_tokens=not rendered)["input_ids"])
    except Exception as error:  # tokenizers raises bare Exception, for one for a character that it has no token for
        raise InputError(f'example "{example.id}": the tokenizer refuses its prompt ({_reason(error)})') from None
    if not rendered and _appends_eos(tokenizer):
        token_ids.pop()
    return text, token_ids


def _appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    eos = tokenizer.eos_token_id
    return eos is not None and tokenizer("")["input_ids"][-1:] == [eos] and eos != tokenizer.bos_token_id


def _render(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        wanted = "is a list of messages" if isinstance(example.prompt, list) else "is to be rendered (`data.chat`)"
        raise InputError(f'example "{example.id}": its prompt {wanted}, but the tokenizer of {tokenizer.name_or_path} has no chat template')
    messages: list[dict[str, Any]] = example.prompt if isinstance(example.prompt, list) else [{"role": "user", "content": example.prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja2's errors, and what a template raises by itself
        raise InputError(f'example "{example.id}": the chat template refuses its prompt ({_reason(error)})') from None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
