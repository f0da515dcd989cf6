"""Weights from a Hugging Face folder into Megatron's distributed format and back, on ranks of this machine.

A Megatron folder is `megatron/` (Megatron's distributed checkpoint, readable under any layout) beside the configuration and tokenizer
files of the Hugging Face folder that it came from. A run's checkpoint has `megatron/` alone; what it lacks is in the run's model folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megarl.config.recipe import Layout, Recipe
from megarl.errors import InputError
from megarl.models.hf_config import ModelShape, check_layout, read_model_shape
from megarl.models.hf_tensors import HFTensors, check_weights
from megarl.training.local_ranks import run_ranks

WEIGHTS = "megatron"


@dataclass(frozen=True)
class Job:
    source: str
    """Hugging Face folder of the configuration, and of the weights if there is no `checkpoint`."""
    checkpoint: str | None
    """Megatron's distributed checkpoint to read the weights from."""
    output: str
    shape: ModelShape
    layout: Layout
    bf16: bool | None
    """None: as the checkpoint is."""
    pad_vocab_to: int


def convert(source: Path, output: Path, layout: Layout) -> str:
    """Convert `source` into the new folder `output` with the ranks of `layout`; returns the format that was written.

    A folder with `megatron/` becomes a Hugging Face folder, a Hugging Face folder a Megatron folder. Weights keep their precision.

    Raises:
        InputError: `source` is neither, is damaged, or does not fit the layout; `output` exists.
    """
    if output.exists():
        raise InputError(f"{output}: exists already; remove it or choose another folder.")
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; expected a Hugging Face folder, a Megatron folder or a run's checkpoint.")
    to_megatron = not (source / WEIGHTS).is_dir()
    model, pad = (source, _PAD) if to_megatron else _origin(source)
    bf16 = None
    shape = read_model_shape(model)
    check_layout(shape, layout, source=str(model))
    if to_megatron:
        check_weights(model, shape)
        bf16 = HFTensors(model)["model.norm.weight"].dtype.itemsize == 2
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        checkpoint = None if to_megatron else str((source / WEIGHTS).resolve())
        job = Job(str(model.resolve()), checkpoint, str((temporary / "new").resolve()), shape, layout, bf16, pad)
        (temporary / "new").mkdir()
        run_ranks(layout.world_size, convert_on_rank, job)
        os.chmod(temporary / "new", 0o755)
        os.replace(temporary / "new", output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return "Megatron" if to_megatron else "Hugging Face"


_PAD = 64


def _origin(source: Path) -> tuple[Path, int]:
    """(folder with config.json, padding of the vocabulary) of a folder with `megatron/`."""
    if (source / "config.json").is_file():
        return source, _PAD
    recipe = source.parent.parent / "recipe.yaml"  # RUN/checkpoints/step-000020
    if not recipe.is_file():
        raise InputError(f"{source}: has neither config.json nor, as a run's checkpoint, recipe.yaml two folders above.")
    from megarl.config.load import load_recipe

    settings = load_recipe(recipe, [], Recipe).recipe
    return Path(settings.model.path), settings.model.pad_vocab_to_multiple_of


def _saved_in_16_bits(folder: str) -> bool:
    from megatron.core.dist_checkpointing import load_tensors_metadata

    try:
        tensors = load_tensors_metadata(folder)
        return next(tensor for name, tensor in tensors.items() if name.endswith("final_layernorm.weight")).dtype.itemsize == 2
    except Exception as error:  # whatever Megatron raises for a folder that is none of its checkpoints
        raise InputError(f"{folder}: is no whole checkpoint of a model by Megatron ({type(error).__name__}).") from None


def convert_on_rank(job: Job) -> None:
    import torch.distributed as dist

    from megarl.models.hf_folder import copy_side_files, write_hf_folder
    from megarl.models.hf_weights import HFExporter, load_hf_weights
    from megarl.models.policy import build_policy
    from megarl.training import parallel
    from megarl.training.checkpoint import load_weights, save_weights

    parallel.initialize(job.layout, seed=0)
    bf16 = _saved_in_16_bits(job.checkpoint) if job.bf16 is None else job.bf16
    chunks = build_policy(job.shape, job.layout, job.pad_vocab_to, bf16=bf16)
    if job.checkpoint is None:
        load_hf_weights(chunks, job.shape, HFTensors(job.source))
        if dist.get_rank() == 0:
            copy_side_files(Path(job.source), Path(job.output))
            (Path(job.output) / WEIGHTS).mkdir()
        dist.barrier()
        save_weights(chunks, str(Path(job.output) / WEIGHTS))
        return
    load_weights(chunks, job.checkpoint)
    exporter = HFExporter(chunks, job.shape)
    if dist.get_rank() == 0:
        write_hf_folder(exporter.stream(), source=job.source, folder=Path(job.output))
    elif exporter.takes_part:
        for _ in exporter.stream():
            pass
