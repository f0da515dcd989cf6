"""What one weight sync carries, and how it is cut into buckets: one rule for the sender and for every receiver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGNMENT = 16
"""Bytes. Tensors start at multiples of this inside a bucket, so that a slice of bytes can be viewed as any dtype."""


@dataclass(frozen=True)
class Manifest:
    """Names, dtypes (`float32`, not `torch.float32`) and shapes of the tensors of a weight sync, in the order of sending.

    Raises ValueError if the three disagree in length, a name comes twice, or a dtype is unknown.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            lengths = f"{len(self.names)}, {len(self.dtypes)}, {len(self.shapes)}"
            raise ValueError(f"a manifest needs as many dtypes and shapes as names, not {lengths}")
        if len(set(self.names)) != len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise ValueError(f"the manifest names {twice} twice")
        for name, dtype in zip(self.names, self.dtypes):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"the manifest gives {name} the unknown dtype {dtype!r}")

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """The manifest of (name, tensor) pairs; no data is copied."""
        pairs = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
        return cls(*(tuple(column) for column in zip(*pairs))) if pairs else cls((), (), ())

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(self.dtypes, self.shapes))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the padding between them."""
        return sum(self.sizes)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Bucket:
    """Tensors `start` to `stop` of a manifest in one buffer of `nbytes` bytes; `offsets` say where each begins."""

    start: int
    stop: int
    offsets: tuple[int, ...]
    nbytes: int


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Cut a manifest into buckets of at most `bucket_bytes`, in order; a tensor above that gets a bucket of its own."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    result: list[Bucket] = []
    start, end, offsets = 0, 0, []
    for index, size in enumerate(manifest.sizes):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offsets and offset + size > bucket_bytes:
            result.append(Bucket(start, index, tuple(offsets), end))
            start, offset, offsets = index, 0, []
        offsets.append(offset)
        end = offset + size
    if offsets:
        result.append(Bucket(start, len(manifest), tuple(offsets), end))
    return result


def pack(bucket: Bucket, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor) -> None:
    """Copy the bucket's tensors, taken from `tensors`, into `buffer` [bucket.nbytes] uint8."""
    for index, offset in zip(range(bucket.start, bucket.stop), bucket.offsets):
        _, tensor = next(tensors)
        size = manifest.sizes[index]
        if size:
            buffer[offset : offset + size].view(tensor.dtype).copy_(tensor.detach().reshape(-1))


def unpack(bucket: Bucket, manifest: Manifest, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of a received `buffer` [bucket.nbytes] uint8; the tensors are views of it."""
    pairs = []
    for index, offset in zip(range(bucket.start, bucket.stop), bucket.offsets):
        data = buffer[offset : offset + manifest.sizes[index]]
        pairs.append((manifest.names[index], data.view(getattr(torch, manifest.dtypes[index])).view(manifest.shapes[index])))
    return pairs


def checked(manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs; RuntimeError naming the first tensor that is not what the manifest announced (receivers are sized by it)."""
    count = 0
    for name, tensor in tensors:
        if count == len(manifest):
            raise RuntimeError(f"weight sync: {name} comes after the last of the {count} tensors of the manifest")
        want = manifest.names[count], manifest.dtypes[count], manifest.shapes[count]
        got = name, dtype_name(tensor.dtype), tuple(tensor.shape)
        if got != want:
            raise RuntimeError(f"weight sync: tensor {count} should be {_text(want)} by the manifest, but is {_text(got)}")
        count += 1
        yield name, tensor
    if count != len(manifest):
        raise RuntimeError(f"weight sync: the tensors end after {count} of {len(manifest)}; the next should be {manifest.names[count]}")


def _text(tensor: tuple[str, str, tuple[int, ...]]) -> str:
    name, dtype, shape = tensor
    return f"{name} {dtype}{list(shape)}"
