"""The keys of a prompt's blocks as they travel to the scheduler: 8 bytes of each, end to end in one object.

A prompt of 4,096 blocks as a tuple of digests is 160 kB in 4,096 objects, which Ray would put into shared memory; like
this it is 32 kB that go with the call. Invariant: reads like the tuple of the shortened keys. Made by the gateway,
read by the router; whoever compares keys with these compares their first 8 bytes.

`short` and `words` give the same keys as numbers, for tables: 56 bits, which fit the smallest integers that can do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import overload

KEPT = 8
"""Bytes of a key: enough to tell the blocks of a cluster apart for a hint, which the worker's own match decides on."""
SHORT_MASK = 2**56 - 1


class PackedKeys(Sequence[bytes]):
    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> PackedKeys:
        return cls(b"".join([key[:KEPT] for key in keys]))

    def __len__(self) -> int:
        return len(self._data) // KEPT

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return PackedKeys(self._data[start * KEPT : stop * KEPT])
            return tuple(self[place] for place in range(start, stop, step))
        key = self._data[index * KEPT : index * KEPT + KEPT]
        if index < 0 or not key:
            raise IndexError(f"there is no block {index} among {len(self)}")
        return key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedKeys) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __reduce__(self) -> tuple[type[PackedKeys], tuple[bytes]]:
        return PackedKeys, (self._data,)

    @property
    def words(self) -> memoryview[int]:
        """The keys as numbers of 64 bits, without a copy."""
        return memoryview(self._data).cast("Q")


def short(key: bytes) -> int:
    """A key as a number."""
    return int.from_bytes(key[:KEPT], sys.byteorder) & SHORT_MASK


class _Words(Sequence[int]):
    """Whole keys, read as `PackedKeys.words`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # nobody slices it
        return int.from_bytes(self._keys[index][:KEPT], sys.byteorder)


def words(keys: Sequence[bytes]) -> Sequence[int]:
    """Keys as numbers, made when they are read; masked with `SHORT_MASK` they are those of `short`."""
    return keys.words if isinstance(keys, PackedKeys) else _Words(keys)
