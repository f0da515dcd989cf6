"""The one place that knows a CPU from a GPU. Everywhere else the code is the same on both."""

from megarl.platform.device import (
    communication_backend,
    device,
    fused_kernels,
    has_gpu,
    prepare_megatron,
    synchronize,
    use_gpu,
    use_threads,
)

__all__ = ["communication_backend", "device", "fused_kernels", "has_gpu", "prepare_megatron", "synchronize", "use_gpu", "use_threads"]
