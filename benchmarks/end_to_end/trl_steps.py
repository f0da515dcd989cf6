"""Steps of the quick start by TRL's GRPOTrainer with vLLM in its process: prints one JSON object with the seconds of each step by phase.

    .venv-trl/bin/python benchmarks/end_to_end/trl_steps.py MODEL TRAIN.jsonl STEPS

The same model, prompts per step, responses per prompt, mini-batches, optimizer, reward function, number of updates as yaml/quickstart.yaml.
A step is one rollout of 64 x 8 responses and 4 optimizer updates, that is 4 steps in TRL's count. On a CPU TRL's weight sync writes into
weights that vLLM has repacked; `repaired_sync` does what vLLM offers for that, so that the engine samples from the trained policy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}

import itertools

import pyarrow
import torch
import trl.extras.profiling as profiling
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from megarl.tasks.dataset import Example, read_examples
from megarl.tasks.verifiers import make_verifier

PROMPTS, SAMPLES, UPDATES, MAX_NEW, LEARNING_RATE = 64, 8, 4, 12, 1e-4

seconds: dict[str, float] = defaultdict(float)
snapshots: list[dict[str, float]] = []


def booked(name):
    def decorate(function):
        def wrapped(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        return wrapped

    return decorate


# TRL times its own parts, for loggers that are not installed here.
profiling.ProfilingContext._log_metrics = lambda self, duration: seconds.__setitem__(
    self.name.split(".", 1)[1], seconds[self.name.split(".", 1)[1]] + duration
)


def repaired_sync(self) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    with torch.no_grad():
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights((name, p) for name, p in self._iter_named_params() if name != "lm_head.weight")
        finalize_layerwise_reload(runner.model, runner.model_config)
    self.llm.reset_prefix_cache()


VLLMGeneration.sync_weights = booked("sync")(repaired_sync)


class Trainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        snapshots.append(dict(seconds) | {"clock": time.perf_counter()})
        return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        name = "policy forward" if torch.is_grad_enabled() else "old log-probs"
        return booked(name)(super()._get_per_token_logps_and_entropies)(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        return booked("training_step")(super().training_step)(*args, **kwargs)


def main(model_path: str, data_path: str, steps: int) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    examples = read_examples(data_path)[: steps * PROMPTS]
    verifier = make_verifier("countdown", {"format": "plain", "symbols": "+-"})
    rows = [{"prompt": e.prompt, "answer": e.answer, "numbers": e.metadata["numbers"]} for e in examples]
    # Built by hand: the library's fingerprinting cannot pickle what vLLM has imported.
    dataset = Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="countdown")

    def reward(prompts, completions, completion_ids, answer, numbers, **_):
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        lines = zip(prompts, texts, answer, numbers, strict=True)
        return [verifier(text, Example("", prompt, a, {"numbers": n}, ())).reward for prompt, text, a, n in lines]

    config = GRPOConfig(
        output_dir="runs/benchmark-trl",
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES // UPDATES,
        gradient_accumulation_steps=1,
        steps_per_generation=UPDATES,
        num_generations=SAMPLES,
        num_iterations=1,
        max_completion_length=MAX_NEW,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps * UPDATES,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        logging_steps=UPDATES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64,
    )
    trainer = Trainer(model=model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    snapshots.append(dict(seconds) | {"clock": time.perf_counter()})
    result = []
    for before, after in itertools.pairwise(snapshots):
        spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
        step = spent["clock"]
        phases = {
            "generate": spent.get("vLLM.generate", 0.0),
            "verify": spent.get("_calculate_rewards", 0.0),
            "sync": spent.get("sync", 0.0),
            "logprobs": spent.get("old log-probs", 0.0),
            # Forward, loss, backward; TRL prepares its rollouts inside of its training step.
            "train": spent.get("training_step", 0.0) - spent.get("_prepare_inputs", 0.0),
        }
        phases["other"] = step - sum(phases.values())
        result.append(phases | {"step": step})
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
