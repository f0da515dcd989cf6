"""Promise: roles that the machine has no GPUs for are refused before any of them starts."""

import pytest

from megarl.errors import InputError
from megarl.loop import machine
from megarl.platform import rollout_env


@pytest.fixture
def gpus(monkeypatch):
    """This machine with so many GPUs; no Ray is running."""

    def put(count):
        monkeypatch.setattr(machine, "has_gpu", lambda: count > 0)
        monkeypatch.setattr(rollout_env, "gpus", lambda: count)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return put


def test_without_gpus_an_engine_is_one_process(gpus):
    gpus(0)
    machine.check_roles(engines=8, ranks=64)
    machine.check_roles(ranks=2, tensor_parallel=2)
    with pytest.raises(InputError, match=r"^rollout\.tensor_parallel = 2: without GPUs an engine is one process; set it to 1 "):
        machine.check_roles(engines=1, tensor_parallel=2, ranks=1)


def test_every_role_needs_its_gpus(gpus):
    gpus(8)
    machine.check_roles(engines=2, tensor_parallel=2, ranks=4)
    with pytest.raises(InputError, match=r"2 engine\(s\) with 2 GPU\(s\) each .* and 5 training rank\(s\) .* need 9 GPUs, there are 8;"):
        machine.check_roles(engines=2, tensor_parallel=2, ranks=5)
    with pytest.raises(InputError, match=r"need 9 GPUs, there are 8"):
        machine.check_roles(ranks=9)


def test_a_cluster_to_be_joined_is_asked_once_it_is(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    machine.check_roles(engines=2, ranks=8)
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    machine.check_roles(engines=2, ranks=6)
    with pytest.raises(InputError, match=r"need 10 GPUs, there are 8"):
        machine.check_roles(engines=2, ranks=8)
