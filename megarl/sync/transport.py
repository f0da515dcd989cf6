"""How weights travel from trainer rank 0 to every worker of every rollout engine: broadcasts in a process group of their own.

Rank 0 of that group is the trainer; engine workers follow. Gloo needs torch alone. NCCL goes through the engine library's own sender,
imported only when it is used.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from megarl.sync.manifest import Manifest, buckets, checked, pack

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 120.0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def process_group(
    host: str, port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S, backend: str = "gloo"
) -> ProcessGroup | ProcessGroupGloo:
    """A process group beside the default one, made alike by all its members; rank 0 listens at `host`:`port`.

    `timeout_s` limits the rendezvous and every later broadcast. Gloo listens on the address that reaches `host`, so the right network
    card is used on a machine with several. Raises RuntimeError when the members do not come together in time.
    """
    if backend != "gloo":
        raise ValueError(f"no process group for backend {backend!r}; NCCL is set up by NcclSender")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _store(host, port, rank, world_size, timeout)
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(host, port))]
        return ProcessGroupGloo(PrefixStore(f"megarl-sync-{port}", store), rank, world_size, options)
    except Exception as error:
        whose = f"weight sync: rank {rank} of {world_size}"
        raise RuntimeError(f"{whose} found no group at {host}:{port} within {timeout_s:g} s: {error}") from error


def _store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    if rank != 0:
        return TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    # A store that opens its own socket listens on every interface of the machine.
    listening = socket.create_server((host, port), family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listening.detach(),
    )


def _address_towards(host: str, port: int) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket that "connects" sends nothing: the kernel picks the route
        probe.connect(address)
        return probe.getsockname()[0]


def broadcast(group: ProcessGroupGloo, buffer: torch.Tensor) -> None:
    """Broadcast `buffer` from rank 0, in place; RuntimeError if a member is gone or silent for the group's timeout."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()


class GlooSender:
    """Trainer side of the gloo transport; the receiver is `megarl.rollout.weight_receiver`."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = TIMEOUT_S) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._group: ProcessGroupGloo | None = None

    def connect(self, host: str, port: int, world_size: int) -> None:
        """Listen at `host`:`port` and wait for the `world_size` - 1 engine workers. A former group is dropped."""
        self.close()
        self._group = process_group(host, port, 0, world_size, self.timeout_s)

    def send(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast `tensors`, which must be those of the manifest (RuntimeError naming the one that is not).

        RuntimeError also when an engine is gone. After any error the group is closed, so that receivers do not wait for the timeout, and
        `connect` is needed again.
        """
        if self._group is None:
            raise RuntimeError("weight sync: send before connect")
        pairs = checked(manifest, tensors)
        try:
            buffer = torch.empty(0, dtype=torch.uint8)
            for bucket in buckets(manifest, self.bucket_bytes):
                if buffer.numel() < bucket.nbytes:
                    buffer = torch.empty(max(bucket.nbytes, min(manifest.nbytes, self.bucket_bytes)), dtype=torch.uint8)
                pack(bucket, manifest, pairs, buffer)
                if bucket.nbytes:
                    broadcast(self._group, buffer[: bucket.nbytes])
            for _ in pairs:  # lets `checked` see the end
                pass
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None


class NcclSender:
    """Trainer side of the engine library's native `nccl` weight transfer, packed; for trainers and engines on GPUs of their own."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = TIMEOUT_S) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._communicator: Any = None

    def connect(self, host: str, port: int, world_size: int) -> None:
        """As GlooSender.connect; this process must have chosen its device already."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.close()
        self._communicator = trainer_init({"master_address": host, "master_port": port, "world_size": world_size})

    def send(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As GlooSender.send; returns when the data has left the device, so that weights may change again."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if self._communicator is None:
            raise RuntimeError("weight sync: send before connect")
        try:
            packed_nccl_broadcast_producer(
                iterator=checked(manifest, tensors),
                group=self._communicator,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=self.bucket_bytes,
                num_buffers=NCCL_BUFFERS,
            )
            torch.accelerator.synchronize()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


NCCL_BUFFERS = 2
"""Buckets in flight; sender and receivers must agree."""


def receiver_init(
    transport: str, host: str, port: int, rank_offset: int, world_size: int, bucket_bytes: int, timeout_s: float
) -> dict[str, Any]:
    """The initialisation message that an engine's receiver of `transport` (`gloo` or `nccl`) needs to meet the sender."""
    message = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
    if transport == "gloo":
        return message | {"bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
    return message | {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": NCCL_BUFFERS}
