"""From examples to token ids, with the model's own tokenizer."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.errors import InputError
from megarl.tasks.dataset import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TooLong = Literal["error", "drop", "cut_left"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


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
        raise InputError(f"{folder}: no such model folder; expected a Hugging Face folder with a tokenizer.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{folder}: holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}.")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever the damaged file provokes
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({_fault(folder) or _reason(error)}).") from None


def _fault(folder: Path) -> str | None:
    """The damaged file of a tokenizer, and what is wrong with it: transformers often trips only over what it led to."""
    from tokenizers import Tokenizer

    readers = {"tokenizer.json": Tokenizer.from_file} | dict.fromkeys(TOKENIZER_SETTINGS, lambda path: json.loads(Path(path).read_text()))
    for name, read in readers.items():
        if (folder / name).is_file():
            try:
                read(str(folder / name))
            except Exception as error:  # tokenizers raises bare Exception
                return f"{name}: {_reason(error)}"
    return None


def eos_token_ids(model_path: str | Path, vocab_size: int) -> tuple[int, ...]:
    """All ids that end a response, ascending: the union of generation_config.json, config.json and the tokenizer's own.

    Raises InputError naming the file if there is none, or one that the model's `vocab_size` tokens do not include.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder.")
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids.update(_eos_of_file(folder / name, vocab_size))
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        own = load_tokenizer(folder).eos_token_id
        if own is not None and own >= vocab_size:
            raise InputError(f"{folder}: its tokenizer's end-of-sequence token, {own}, {_unknown_token(vocab_size)}.")
        ids.update([] if own is None else [own])
    if not ids:
        raise InputError(f"{folder}: no end-of-sequence token; set `eos_token_id` in its generation_config.json.")
    return tuple(sorted(ids))


def _eos_of_file(file: Path, vocab_size: int) -> list[int]:
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error}).") from None
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise InputError(f"{file}: `eos_token_id` must be a token id or a list of them, got {json.dumps(value)}.")
    unknown = next((item for item in values if item >= vocab_size), None)
    if unknown is not None:
        raise InputError(f"{file}: `eos_token_id` {unknown} {_unknown_token(vocab_size)}.")
    return values


def _unknown_token(vocab_size: int) -> str:
    return f"is no token of the model, whose `vocab_size` is {vocab_size}"


def tokenize(
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat: bool = False,
    too_long: TooLong = "error",
) -> tuple[list[Prompt], int]:
    """(prompts in the order of the examples, number of those that are too long: left out, or cut).

    A list of messages, and with `chat` also a plain prompt (as one user message), is rendered once with the tokenizer's chat template, its
    generation prompt included; the template writes the special tokens, so none are added when the text is tokenised. Any other plain prompt
    is tokenised with the special tokens that the tokenizer itself adds (a BOS for Llama, none for Qwen), except an EOS at the end: the
    response must continue the prompt. `max_prompt_length` counts tokens, special ones included. `too_long="cut_left"` cuts tokens off at
    the beginning, but never a BOS; the engines get token ids, so that nobody cuts the prompt in another way.

    Raises InputError with the id of the example: no chat template, template or tokenizer refuse it, no tokens, or too long with
    `too_long="error"`.
    """
    prompts: list[Prompt] = []
    above = 0
    for example in examples:
        text, token_ids = _encode(example, tokenizer, chat)
        if not token_ids:
            raise InputError(f'example "{example.id}": its prompt has no tokens.')
        if len(token_ids) <= max_prompt_length:
            prompts.append(Prompt(example.id, tuple(token_ids), text, example))
        elif too_long == "drop":
            above += 1
        elif too_long == "cut_left":
            above += 1
            head = token_ids[:1] if token_ids[0] == tokenizer.bos_token_id else []
            token_ids = head + token_ids[len(token_ids) - max_prompt_length + len(head) :]
            prompts.append(Prompt(example.id, tuple(token_ids), tokenizer.decode(token_ids), example))
        else:
            raise InputError(
                f'example "{example.id}": its prompt has {len(token_ids)} tokens, `data.max_prompt_length` is {max_prompt_length}; '
                "raise it, or set `data.too_long` to drop or cut_left."
            )
    if not prompts:
        raise InputError(f"no prompt is left: all {above} are longer than `data.max_prompt_length` ({max_prompt_length} tokens).")
    return prompts, above


def encode(text: str, tokenizer: PreTrainedTokenizerBase, example_id: str, what: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. InputError naming the example and `what` of it the text is, if the tokenizer refuses it."""
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # tokenizers raises bare Exception, for one for a character that it has no token for
        raise InputError(f'example "{example_id}": the tokenizer refuses its {what} ({_reason(error)}).') from None


def _encode(example: Example, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[str, list[int]]:
    rendered = chat or not isinstance(example.prompt, str)
    text = _render(example, tokenizer) if rendered else example.prompt
    token_ids = encode(text, tokenizer, example.id, "prompt", add_special_tokens=not rendered)
    if not rendered and _appends_eos(tokenizer):
        token_ids.pop()
    return text, token_ids


def _appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    eos = tokenizer.eos_token_id
    return eos is not None and tokenizer("")["input_ids"][-1:] == [eos] and eos != tokenizer.bos_token_id


def _render(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        wanted = "is a list of messages" if isinstance(example.prompt, list) else "is to be rendered (`data.chat`)"
        raise InputError(
            f'example "{example.id}": its prompt {wanted}, but the tokenizer of {tokenizer.name_or_path} has no chat template.'
        )
    messages: list[dict[str, Any]] = example.prompt if isinstance(example.prompt, list) else [{"role": "user", "content": example.prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja2's errors, and what a template raises by itself
        raise InputError(f'example "{example.id}": the chat template refuses its prompt ({_reason(error)}).') from None


def _reason(error: Exception) -> str:
    """An error of another package on one line; with its kind, unless that says nothing."""
    text = textwrap.shorten(str(error), 300, placeholder=" ...").rstrip(".")
    kind = "" if isinstance(error, (ValueError, OSError)) or type(error) is Exception else type(error).__name__
    return ": ".join(part for part in (kind, text) if part) or type(error).__name__
