"""What the tests of local ranks run on them. No pytest here: every rank imports this."""

import os
import signal
import subprocess
import sys
import time

from megarl.errors import InputError


def sum_of_ranks(offset):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def fail_on_one_rank(how):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "input error":
            raise InputError("the second rank does not like it.")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "no pickle":
            return lambda: None
    dist.barrier()  # the others wait for a rank that never comes
    return None


def change_a_global():
    import megatron.core.parallel_state as parallel_state

    seen = getattr(parallel_state, "changed_by_test", False)
    parallel_state.changed_by_test = True
    return seen


def sleep_with_a_child(folder):
    """Leave two pids in `folder` by rank, then sleep."""
    import torch.distributed as dist

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = os.path.join(folder, f"rank{dist.get_rank()}")
    with open(path + ".tmp", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(path + ".tmp", path)
    time.sleep(600)
