"""One vLLM engine in a Ray actor: token ids in, token ids and log-probs out, weights replaced between two of its steps.

The engine runs in the actor's own process and is touched by one thread only. Each engine step and each command (add, abort, weights) is one
job of that thread, so commands fall between steps without locks, all requests of a call are there before its first step, and no process
can outlive the actor.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megarl.rollout.response import Response
from megarl.rollout.sampling import Sampling

T = TypeVar("T")

CPU_BLOCK_SIZE = 32
"""Tokens per KV block. The smallest that vLLM's CPU attention takes, and the fastest: its default of 128 wastes work on short responses."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of."""

    model: str
    """Hugging Face folder."""
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    max_num_seqs: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor_parallel: int = 1
    prefix_caching: bool = True
    kv_cache_bytes: int | None = None
    """Default: that of the function `kv_cache_bytes` on a CPU, the engine's own choice on a GPU."""
    gpu_memory_fraction: float = 0.85
    version: int = 0
    """Version of the weights in the folder."""


@dataclass(frozen=True)
class GroupRequest:
    """A prompt and the seeds of the responses that are wanted: one response per seed."""

    prompt_index: int
    token_ids: tuple[int, ...]
    seeds: tuple[int, ...]


def kv_cache_bytes(config: EngineConfig) -> int:
    """Bytes of the KV cache on a CPU: for `max_num_seqs` sequences of `max_model_len`, but a quarter of the machine's memory at most.

    The model's shape is read off its config.json. With less than all sequences need, vLLM postpones or recomputes some.
    """
    model = json.loads((Path(config.model) / "config.json").read_text())
    kv_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    head_size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    element = 4 if config.dtype == "float32" else 2
    per_block = CPU_BLOCK_SIZE * model["num_hidden_layers"] * 2 * kv_heads * head_size * element
    blocks = config.max_num_seqs * math.ceil(config.max_model_len / CPU_BLOCK_SIZE) + 1
    return min(blocks * per_block, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def engine_args(config: EngineConfig, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    from vllm.config import WeightTransferConfig

    common = {
        "model": config.model,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # the probabilities sampled from: after the temperature
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # a folder's generation_config.json must not change sampling
        "disable_log_stats": True,
        "trust_remote_code": False,
        "worker_extension_cls": "megarl.rollout.weight_receiver.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend="nccl" if on_gpu else "megarl_gloo"),
        "seed": 0,  # every request brings its own
    }
    if on_gpu:
        return common | {"gpu_memory_utilization": config.gpu_memory_fraction, "kv_cache_memory_bytes": config.kv_cache_bytes}
    return common | {
        "enforce_eager": True,
        "block_size": CPU_BLOCK_SIZE,
        "kv_cache_memory_bytes": config.kv_cache_bytes or kv_cache_bytes(config),
        # A prompt cut in two steps would have its generator rewound, which generators on a CPU cannot do.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, 16384),
    }


class RolloutEngine:
    """The actor class; `Fleet` makes Ray actors of it."""

    def __init__(self, config: EngineConfig, on_gpu: bool) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "engine")
        self._version = config.version
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._running = asyncio.Event()
        self._running.set()
        self._stepping: asyncio.Task | None = None
        self._failure: str | None = None
        self._llm: Any = self._thread.submit(self._create, on_gpu).result()

    def _create(self, on_gpu: bool) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        import megarl.rollout.weight_receiver  # noqa: F401  registers the backend

        llm = LLMEngine.from_engine_args(EngineArgs(**engine_args(self._config, on_gpu)))
        llm.set_weight_version(str(self._version))
        return llm

    async def health(self) -> dict[str, Any]:
        """Process id, version of the weights, requests in flight. Raises RuntimeError if the engine has failed."""
        self._check()
        unfinished = await self._do(self._llm.get_num_unfinished_requests)
        return {"pid": os.getpid(), "version": self._version, "unfinished": unfinished}

    async def generate(self, requests: list[GroupRequest], sampling: Sampling) -> AsyncIterator[list[list[Response]]]:
        """Yield, whenever prompts are done, the list of their responses (each a list ordered by sample index); each prompt comes once.

        RuntimeError naming prompt and sample if a log-prob is not a finite number.
        """
        self._check()
        call = _Call(requests)
        number, self._next_call = self._next_call, self._next_call + 1
        self._calls[number] = call
        try:
            await self._do(lambda: self._add(number, requests, sampling))
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step_until_idle())
            while call.remaining:
                yield await call.next_groups()
        finally:
            del self._calls[number]
            if call.remaining and self._failure is None:
                await self._do(lambda: self._abort(call.open_requests(number)))

    async def abort(self) -> None:
        """End all requests now; their callers get what there is, with finish reason `abort`."""
        names = [name for number, call in self._calls.items() for name in call.open_requests(number)]
        self._deliver(await self._do(lambda: self._abort(names)))

    async def pause(self) -> None:
        """Take no further step until `resume`; requests stay where they are."""
        self._running.clear()
        await self._do(lambda: None)  # the step in progress has ended when this comes back

    async def resume(self) -> None:
        self._running.set()

    async def reset_prefix_cache(self) -> None:
        await self._do(lambda: self._llm.reset_prefix_cache())

    async def connect_weights(self, message: dict[str, Any]) -> None:
        """Join the trainer's transfer group; `message` is that of `megarl.sync.transport.receiver_init`."""
        await self._do(lambda: self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": message}))

    async def receive_weights(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int, recompute_running: bool
    ) -> float:
        """Receive one set of weights between two steps; returns seconds. The prefix cache, made by the old weights, is emptied.

        Requests in flight go on with the new weights; with `recompute_running` their KV cache is made again by them.
        After an error the weights are part old, part new: the engine refuses everything from then on.
        """
        self._check()
        update = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        try:
            return await self._do(lambda: self._receive(update, version, recompute_running))
        except Exception as error:
            self._fail(f"weights version {version} arrived only in part ({error})")
            raise

    async def shutdown(self) -> None:
        """Stop the engine and its worker processes, if it has any."""
        self._fail("it was shut down")
        if self._stepping is not None:
            self._running.set()
            await asyncio.wait([self._stepping])
        await self._do(lambda: self._llm.engine_core.shutdown())

    # Called in the engine's thread.

    def _add(self, number: int, requests: list[GroupRequest], sampling: Sampling) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._config.prefix_caching and not self._llm.has_unfinished_requests():
            # What earlier calls left in the cache changes the shapes of this call's matrix products, and so its last bits.
            self._llm.reset_prefix_cache()
        for request in requests:
            prompt = {"prompt_token_ids": list(request.token_ids)}
            for sample, seed in enumerate(request.seeds):
                parameters = SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    stop_token_ids=list(sampling.stop_token_ids),
                    ignore_eos=True,  # stop tokens are those we were given, not the ones that the model folder may name
                    seed=seed,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                self._llm.add_request(f"{number}/{request.prompt_index}/{sample}", prompt, parameters)

    def _step(self) -> tuple[list[tuple[int, Response | Exception]], bool]:
        outputs = self._llm.step()
        return [self._response(output) for output in outputs if output.finished], self._llm.has_unfinished_requests()

    def _response(self, output: Any) -> tuple[int, Response | Exception]:
        number, prompt, sample = map(int, output.request_id.split("/"))
        completion = output.outputs[0]
        logprobs = completion.logprobs.logprobs
        tokens = list(completion.token_ids)
        versions = [(int(span.version), span.start, span.end) for span in completion.weight_versions or []]
        whose = f"of sample {sample} of prompt {prompt}, versions {versions}"
        if len(logprobs) != len(tokens):
            return number, RuntimeError(f"the engine gave {len(logprobs)} log-probs for the {len(tokens)} tokens {whose}")
        for position, (token, logprob) in enumerate(zip(tokens, logprobs)):
            if not math.isfinite(logprob):
                return number, RuntimeError(f"the engine gave log-prob {logprob} to token {position} (id {token}) {whose}")
        return number, Response(prompt, sample, tokens, logprobs, completion.finish_reason, versions)

    def _abort(self, names: list[str]) -> list[tuple[int, Response | Exception]]:
        from vllm.v1.engine import FinishReason

        processor = self._llm.output_processor
        responses = []
        for name in names:
            for internal in processor.external_req_ids.get(name, []):
                # Without an output queue vLLM drops the tokens of an aborted request; this is what it would put in the queue.
                output = processor.request_states[internal].make_request_output([], None, FinishReason.ABORT, None)
                responses.append(self._response(output))
        self._llm.abort_request(names)
        return responses

    def _receive(self, update: dict[str, Any], version: int, recompute_running: bool) -> float:
        start = time.perf_counter()
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update})
        self._llm.collective_rpc("finish_weight_update")
        self._llm.set_weight_version(str(version))
        self._llm.reset_prefix_cache(reset_running_requests=recompute_running)
        self._version = version
        return time.perf_counter() - start

    # Called in the event loop.

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    async def _step_until_idle(self) -> None:
        try:
            unfinished = True
            while unfinished and self._failure is None:
                await self._running.wait()
                responses, unfinished = await self._do(self._step)
                self._deliver(responses)
        except Exception as error:
            self._fail(f"a step failed: {error!r}")

    def _deliver(self, responses: list[tuple[int, Response | Exception]]) -> None:
        for number, response in responses:
            if number in self._calls:
                self._calls[number].put(response)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the rollout engine is unusable: {self._failure}")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for call in self._calls.values():
            call.put(RuntimeError(f"the rollout engine is unusable: {self._failure}"))


class _Call:
    """Collects the responses of one `generate` until their prompts are complete."""

    def __init__(self, requests: list[GroupRequest]) -> None:
        self._groups: dict[int, list[Response | None]] = {request.prompt_index: [None] * len(request.seeds) for request in requests}
        if len(self._groups) != len(requests):
            raise ValueError("two requests of one call have the same prompt index")
        self._done: list[list[Response]] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.remaining = len(requests)

    def put(self, response: Response | Exception) -> None:
        if isinstance(response, Exception):
            self._error = response
            self._changed.set()
            return
        group = self._groups[response.prompt_index]
        group[response.sample_index] = response
        if None not in group:
            self._done.append(self._groups.pop(response.prompt_index))
            self._changed.set()

    async def next_groups(self) -> list[list[Response]]:
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        done, self._done = self._done, []
        self.remaining -= len(done)
        return done

    def open_requests(self, number: int) -> list[str]:
        return [f"{number}/{index}/{i}" for index, group in self._groups.items() for i, response in enumerate(group) if response is None]
