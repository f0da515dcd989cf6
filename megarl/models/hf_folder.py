"""Writing a model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 4 << 30
# Everything beside the weights: configuration, tokenizer, chat template, licence. Never code.
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")


def write_hf_folder(
    tensors: Iterable[tuple[str, torch.Tensor]], *, source: str | Path, folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write streamed weights with the other files of `source`. The folder appears complete or not at all; one of that name is replaced.

    At most `shard_bytes` (or one tensor) are held in memory.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        copy_side_files(Path(source), temporary)
        _write_weights(tensors, temporary, shard_bytes)
        os.chmod(temporary, 0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_side_files(source: Path, folder: Path) -> None:
    """Configuration, tokenizer and texts of a Hugging Face folder, but neither weights nor code."""
    for path in source.iterdir():
        if path.suffix in _COPIED and not path.name.startswith("model.safetensors"):
            shutil.copy2(path, folder / path.name)


def _write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor.detach().cpu().clone()
        size += nbytes
        total += nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "shard-0.safetensors", folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"shard-{index}.safetensors", folder / file)
        weight_map |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)
