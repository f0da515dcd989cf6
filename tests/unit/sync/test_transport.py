"""The gloo transport between threads of one process: real sockets, a real process group."""

import socket
import threading
import time

import pytest
import torch

from megarl.sync.manifest import Manifest, buckets, unpack
from megarl.sync.transport import GlooSender, broadcast, free_port, process_group

TENSORS = [
    ("a", torch.arange(10.0)),
    ("b", torch.ones(3, 5, dtype=torch.bfloat16)),
    ("empty", torch.empty(0, 4)),
    ("c", torch.full((7,), 3, dtype=torch.uint8)),
]
MANIFEST = Manifest.of(TENSORS)


def run(members):
    """Run functions in threads; returns what each returned or raised."""
    results = [None] * len(members)

    def call(index, member):
        try:
            results[index] = member()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def receive(port, rank, world_size, bucket_bytes, timeout_s=20.0):
    group = process_group("127.0.0.1", port, rank, world_size, timeout_s)
    received = []
    for bucket in buckets(MANIFEST, bucket_bytes):
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        if bucket.nbytes:
            broadcast(group, buffer)
        received += unpack(bucket, MANIFEST, buffer)
    return received


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_all_receivers_get_what_was_sent(bucket_bytes):
    port, sender = free_port(), GlooSender(bucket_bytes, 20.0)

    def send():
        sender.connect("127.0.0.1", port, 3)
        sender.send(MANIFEST, iter(TENSORS))

    error, *received = run([send, lambda: receive(port, 1, 3, bucket_bytes), lambda: receive(port, 2, 3, bucket_bytes)])
    assert error is None
    for copy in received:
        assert [name for name, _ in copy] == list(MANIFEST.names)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(TENSORS, copy))


def test_an_error_in_the_tensors_ends_the_receivers_wait_at_once():
    port, sender = free_port(), GlooSender(1, 60.0)

    def send():
        sender.connect("127.0.0.1", port, 2)
        sender.send(MANIFEST, iter([TENSORS[0], ("wrong", torch.zeros(1))]))

    start = time.monotonic()
    sent, received = run([send, lambda: receive(port, 1, 2, 1, 60.0)])
    assert isinstance(sent, RuntimeError) and "b bfloat16[3, 5] by the manifest, but is wrong" in str(sent)
    assert isinstance(received, RuntimeError)
    assert time.monotonic() - start < 30
    with pytest.raises(RuntimeError, match="send before connect"):
        sender.send(MANIFEST, iter(TENSORS))


def test_a_missing_member_is_an_error_after_the_timeout():
    port = free_port()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 1 of 2 found no group at 127.0.0.1:{port} within 2 s"):
        process_group("127.0.0.1", port, 1, 2, 2.0)
    assert time.monotonic() - start < 20


def test_a_silent_member_is_an_error_after_the_timeout():
    port, sender = free_port(), GlooSender(timeout_s=5.0)
    done = threading.Event()

    def silent():
        group = process_group("127.0.0.1", port, 1, 2, 20.0)
        done.wait(40)
        return group

    def send():
        try:
            sender.connect("127.0.0.1", port, 2)
            big = [("w", torch.zeros(64 << 20, dtype=torch.uint8))]  # more than sockets buffer
            sender.send(Manifest.of(big), iter(big))
        finally:
            done.set()

    sent, _ = run([send, silent])
    assert isinstance(sent, RuntimeError)


def test_the_store_listens_on_the_given_address_only():
    port, sender = free_port(), GlooSender(timeout_s=20.0)
    refused = []

    def probe():
        group = process_group("127.0.0.1", port, 1, 2, 20.0)
        with socket.socket() as other:
            refused.append(other.connect_ex(("127.0.0.2", port)))  # loopback too, but another address
        return group

    run([lambda: sender.connect("127.0.0.1", port, 2), probe])
    assert refused and refused[0] != 0
    sender.close()
