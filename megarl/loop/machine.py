"""Whether a recipe's roles fit the machine or the cluster, asked before any of them starts."""

from __future__ import annotations

from megarl.errors import InputError
from megarl.platform.device import has_gpu
from megarl.platform.rollout_env import available_gpus


def check_roles(*, engines: int = 0, tensor_parallel: int = 1, ranks: int = 0) -> None:
    """InputError for roles that can never start here.

    The GPUs of a cluster that is to be joined are not known before; then, ask again once it is.
    """
    if not has_gpu():
        if engines and tensor_parallel > 1:
            raise InputError(
                f"rollout.tensor_parallel = {tensor_parallel}: without GPUs an engine is one process; "
                "set it to 1 and use more `rollout.engines` instead."
            )
        return
    needed, available = engines * tensor_parallel + ranks, available_gpus()
    if available is not None and needed > available:
        raise InputError(
            f"{engines} engine(s) with {tensor_parallel} GPU(s) each (`rollout.engines`, `rollout.tensor_parallel`) and {ranks} training "
            f"rank(s) (`training.layout`) need {needed} GPUs, there are {available}; lower one of them, or join a larger Ray cluster "
            "(RAY_ADDRESS)."
        )
