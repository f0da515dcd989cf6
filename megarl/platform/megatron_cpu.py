"""megatron-core on a machine without a GPU, over gloo.

Megatron asks `torch.cuda` for devices, streams, events and random states, and passes `device="cuda"` to factory functions.
Here the global name `torch` *inside megatron's own modules* is replaced by a proxy that answers with the CPU. torch itself is
left alone: patching, say, `torch.arange` for everyone breaks `with torch.device("meta")`, and with it the model loading of
transformers, silently. Two methods of `torch.Tensor` are the exception (see `_patch_tensor`).

The rest of this file replaces the functions of Megatron that call CUDA through other names or ask of gloo what only NCCL can do, and its
Adam (`cpu_adam`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import time
import types
import warnings

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)
_installed = False


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    def wait_event(self, *args):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True


class _Event(_Stream):
    def record(self, *args):
        self.time = time.perf_counter()

    def wait(self, *args):
        pass

    def elapsed_time(self, later: _Event) -> float:
        return (later.time - self.time) * 1e3


class _Proxy(types.ModuleType):
    """A module seen through replacements: what is not replaced comes from the real one."""

    def __init__(self, real: types.ModuleType, replacements: dict):
        super().__init__(real.__name__)
        self.__dict__.update(replacements)
        self.__dict__["_real"] = real

    def __getattr__(self, name):
        return getattr(self._real, name)


def _names_cuda(device) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _torch_proxy() -> types.ModuleType:
    stream = _Stream()
    nothing, zero = (lambda *args, **kwargs: None), (lambda *args, **kwargs: 0)
    get_rng = lambda *args, **kwargs: torch.get_rng_state()
    set_rng = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda = _Proxy(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "current_stream": lambda *args: stream,
            "default_stream": lambda *args: stream,
            "stream": lambda *args: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "manual_seed": torch.manual_seed,
            "get_rng_state": get_rng,
            "set_rng_state": set_rng,
            "random": types.SimpleNamespace(get_rng_state=get_rng, set_rng_state=set_rng),
            "memory_stats": lambda *args: {},
            "Stream": _Stream,
            "Event": _Event,
            "nvtx": types.SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *args, **kwargs: contextlib.nullcontext()),
            **dict.fromkeys(("synchronize", "empty_cache", "set_device", "set_stream"), nothing),
            **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), zero),
        },
    )
    return _Proxy(torch, {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES} | {"cuda": cuda})


class _ProxyHook:
    """Swaps the global `torch` of each megatron.core module right after its body has run."""

    def __init__(self, proxy: types.ModuleType):
        self.proxy = proxy

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run_body = spec.loader.exec_module

        def exec_module(module):
            run_body(module)
            if module.__dict__.get("torch") is torch:
                module.torch = self.proxy

        spec.loader.exec_module = exec_module
        return spec


def _patch_tensor() -> None:
    # `Tensor.cuda` raises on a build without CUDA; Megatron calls it on freshly made buffers.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # Megatron's optimizer compares `Tensor.type()` with 'torch.cuda.FloatTensor'. Only its own modules see the answer changed.
    real_type = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        answer = real_type(self, *args, **kwargs)
        asks_name = not args and not kwargs
        if asks_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            answer = answer.replace("torch.", "torch.cuda.")
        return answer

    torch.Tensor.type = tensor_type


def _patch_random() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self, name=megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME):
        # The stock one logs "CPU RNG state changed" on every use, since here the CPU's state is the device's.
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    megatron_random.CudaRNGStatesTracker.fork = fork


def _patch_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Asked for before it is tried; without Transformer Engine the name is not there at all.
    moe_utils.te_general_gemm = None

    # Split sizes must become numpy arrays although they already lie on the CPU.
    def to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _patch_uneven_collectives() -> None:
    """Parts of unequal size, as expert-tensor ranks exchange them: NCCL takes them, gloo does not."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    even_gather, even_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(part, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(part, group, None, use_global_buffer)
        padded = part.new_zeros((max(output_split_sizes), *part.shape[1:]))
        padded[: len(part)] = part
        parts = even_gather(padded, group).unflatten(0, (group.size(), -1))
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter(whole, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(whole, group, None, use_global_buffer)
        whole = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def install() -> None:
    """Install all of the above, once per process. Raises RuntimeError if megatron.core was imported before."""
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megarl.platform.prepare_megatron()")
    _installed = True
    _patch_tensor()
    sys.meta_path.insert(0, _ProxyHook(_torch_proxy()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
        _patch_random()
        _patch_experts()
        _patch_uneven_collectives()
        from megarl.platform import cpu_adam

        cpu_adam.install()
