"""The rule that cuts a weight sync into buckets: sender and receivers apply it apart and must agree to the byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.sync.manifest import ALIGNMENT, Manifest, buckets, checked, pack, unpack

DTYPES = ("float32", "bfloat16", "uint8", "float64", "float8_e4m3fn")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def manifests(draw):
    tensors = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12))
    return Manifest(tuple(f"w{i}" for i in range(len(tensors))), tuple(d for d, _ in tensors), tuple(s for _, s in tensors))


@settings(max_examples=200, deadline=None)
@given(manifests(), st.integers(1, 400))
def test_every_tensor_is_in_one_bucket_in_order_and_buckets_are_small(manifest, limit):
    cut = buckets(manifest, limit)
    assert [i for bucket in cut for i in range(bucket.start, bucket.stop)] == list(range(len(manifest)))
    for bucket in cut:
        sizes = manifest.sizes[bucket.start : bucket.stop]
        assert len(bucket.offsets) == len(sizes) >= 1
        assert bucket.nbytes <= limit or len(sizes) == 1
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        ends = [offset + size for offset, size in zip(bucket.offsets, sizes)]
        assert bucket.nbytes == ends[-1]
        assert all(end <= offset for end, offset in zip(ends, bucket.offsets[1:]))


@settings(max_examples=100, deadline=None)
@given(manifests(), st.integers(1, 400))
def test_what_is_unpacked_is_what_was_packed_bit_for_bit(manifest, limit):
    torch.manual_seed(0)
    sent = []
    for name, dtype, shape, size in zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.sizes):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        sent.append((name, tensor))
    pairs = checked(manifest, sent)
    received = []
    for bucket in buckets(manifest, limit):
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        pack(bucket, manifest, pairs, buffer)
        received += unpack(bucket, manifest, buffer)
    assert list(pairs) == []
    for (name, before), (name_after, after) in zip(sent, received, strict=True):
        assert name == name_after and before.dtype == after.dtype and before.shape == after.shape
        assert torch.equal(before.reshape(-1).view(torch.uint8), after.reshape(-1).view(torch.uint8))


def test_a_tensor_that_is_not_contiguous_is_packed_by_value():
    weight = torch.arange(12.0).view(3, 4).t()
    manifest = Manifest.of([("w", weight)])
    (bucket,) = buckets(manifest, 1 << 20)
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
    pack(bucket, manifest, iter([("w", weight)]), buffer)
    assert torch.equal(unpack(bucket, manifest, buffer)[0][1], weight)


def test_manifest_counts_bytes():
    manifest = Manifest(("a", "b"), ("float32", "bfloat16"), ((2, 3), (5,)))
    assert manifest.sizes == (24, 10) and manifest.nbytes == 34 and len(manifest) == 2
    assert Manifest.of([]) == Manifest((), (), ()) and Manifest((), (), ()).nbytes == 0


@pytest.mark.parametrize(
    "names, dtypes, shapes, message",
    [
        (("a",), (), ((1,),), "as many"),
        (("a", "a"), ("float32",) * 2, ((1,), (1,)), "a twice"),
        (("a",), ("float31",), ((1,),), "unknown dtype 'float31'"),
        (("a",), ("load",), ((1,),), "unknown dtype 'load'"),
    ],
)
def test_a_wrong_manifest_is_refused(names, dtypes, shapes, message):
    with pytest.raises(ValueError, match=message):
        Manifest(names, dtypes, shapes)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ([("a", torch.zeros(2)), ("c", torch.zeros(3))], "tensor 1 should be b float32\\[3\\] by the manifest, but is c"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(4))], "but is b float32\\[4\\]"),
        ([("a", torch.zeros(2, dtype=torch.bfloat16))], "but is a bfloat16\\[2\\]"),
        ([("a", torch.zeros(2))], "end after 1 of 2; the next should be b"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))], "c comes after the last"),
    ],
)
def test_tensors_that_are_not_those_of_the_manifest_are_named(tensors, message):
    manifest = Manifest(("a", "b"), ("float32", "float32"), ((2,), (3,)))
    with pytest.raises(RuntimeError, match=message):
        list(checked(manifest, tensors))
