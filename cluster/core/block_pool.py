"""One fixed pool of blocks.

A block is free, or cached (published and used by nobody), or in use: by the requests whose paths through the tree it
lies on, or, unpublished, by the one request that writes it. Running out is an answer (None), not an error, and it
evicts nothing.

Invariant: free + cached + in use = total, and a block is in exactly one of the three. Called by `Holding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.eviction import EvictionPolicy
from cluster.core.frontier import TreeListener
from cluster.core.prefix_tree import PrefixTree
from cluster.core.runs import Run


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as configured: `block_size` in positions, `num_blocks`, and the lookahead `span` of its KV in tokens.

    `window`: how many positions a token sees, itself included, if every layer of the pool has a sliding window; then
    what lies further back needn't be kept. `model` is the fingerprint of the weights that write the KV, `kv_dtype` how
    it is stored: both keep caches apart.
    """

    name: str
    block_size: int
    num_blocks: int
    span: int = 0
    model: str = ""
    kv_dtype: str = "float32"
    window: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("block_size", 1), ("num_blocks", 1), ("span", 0), ("window", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"{field} of pool {self.name!r} is {value}, but must be at least {least}")

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def most_blocks(self, positions: int, step: int) -> int:
        """Blocks that a request of so many positions holds at once, if it computes at most `step` in a step.

        Blocks behind a window are let go a window's worth at a time."""
        kept = positions if self.window is None else 2 * self.window + self.block_size + step
        return self.blocks_for(min(positions, kept))

    def first_seen(self, position: int) -> int:
        """Index of the first block that a token at this position, or one after it, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class PoolMeters:
    """Blocks of a pool by state. `reserved` are those among `in_use` that a step under way has taken and may give
    back."""

    total: int
    free: int
    cached: int
    in_use: int
    reserved: int


class BlockPool:
    """The blocks of one pool and the tree of those that are published."""

    def __init__(
        self,
        spec: PoolSpec,
        name_size: int | None = None,
        policy: EvictionPolicy[Run] | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        self.spec = spec
        self.reserved = 0
        self._free = list(range(spec.num_blocks - 1, -1, -1))
        self.tree = PrefixTree(spec.block_size, self._free, name_size, policy, listener)

    @property
    def available(self) -> int:
        """Blocks that can be had, by eviction if need be."""
        return len(self._free) + self.tree.cached

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks whose contents are undefined, or None if there aren't as many; then nothing is evicted."""
        free = self._free
        if count > len(free):
            if count > self.available:
                return None
            self.tree.evict(count - len(free))
        split = len(free) - count
        taken = free[split:]
        del free[split:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Frees blocks that were allocated and not published since."""
        self._free += blocks

    def meters(self) -> PoolMeters:
        free, cached, total = len(self._free), self.tree.cached, self.spec.num_blocks
        return PoolMeters(total, free, cached, total - free - cached, self.reserved)


def split_budget(
    total_bytes: int, bytes_per_token: Sequence[int], block_sizes: Sequence[int], spare_blocks: int = 1
) -> list[int]:
    """Blocks for each pool out of the one byte budget of them all, so that all hold about as many positions.

    Each pool is also charged for `spare_blocks`, such as the trash block, which are not among those returned.
    Raises ValueError if the budget isn't enough for one block in each pool.
    """
    spare = sum(width * size * spare_blocks for width, size in zip(bytes_per_token, block_sizes, strict=True))
    positions = (total_bytes - spare) // sum(bytes_per_token)
    blocks = [positions // size for size in block_sizes]
    if min(blocks) < 1:
        needed = spare + max(block_sizes) * sum(bytes_per_token)
        raise ValueError(f"KV budget is {total_bytes} bytes, but must be at least {needed}, one block in each pool")
    return blocks
