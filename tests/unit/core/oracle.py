"""The token oracle: pools whose KV cells hold the very tokens that they were computed from.

The KV of position i in a pool of span D is a function of tokens 0..i+D, so a cell of the oracle holds exactly these
tokens. `OracleTensors` carries out copies and writes as an engine would, with garbage where an engine leaves garbage.
Then every cell that may be read can be compared with what it ought to be; this uncovers almost any mistake in
sharing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cluster.core.handle import CacheHandle, Coupling
from cluster.core.holding import BlockCopy
from cluster.core.keys import KeyStream, ReuseScope
from cluster.core.paired_cache import PairedCache, PoolSpec
from cluster.core.runs import Run

Cell = tuple[int, ...]
GARBAGE = (-1,)
INCOMPLETE = -2
"""Ends a cell that was computed without what belongs in a hole: right for its own request, and for nobody else."""


class OracleTensors:
    """Cells of all pools of a cache: (pool, block, offset) -> tokens that the KV there was computed from."""

    def __init__(self, cache: PairedCache) -> None:
        self.cache = cache
        self.cells: dict[tuple[str, int, int], Cell] = {}

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Carries out copy-on-write, in order."""
        for each in copies:
            for offset in range(each.units):
                self.cells[each.pool, each.dst, offset] = self.cells[each.pool, each.src, offset]

    def read(self, handle: CacheHandle, pool: str, position: int) -> Cell | None:
        """What the request reads at one position; None where its table ends or nothing was ever written."""
        size = self.cache.pools[pool].spec.block_size
        table = handle.block_table(pool)
        if position // size >= len(table):
            return None
        return self.cells.get((pool, table[position // size], position % size))

    def write(self, handle: CacheHandle, pool: str, start: int, end: int, tokens: Sequence[int]) -> None:
        """Computes positions [start, end) from `tokens`; below the held ones the KV goes to the trash block."""
        span, size = self.cache.pools[pool].spec.span, self.cache.pools[pool].spec.block_size
        table = handle.block_table(pool)
        for position in range(max(start, handle.held(pool)), end):
            known = position + span < len(tokens)
            cell = self._right(handle, pool, position, tokens) if known else GARBAGE
            self.cells[pool, table[position // size], position % size] = cell

    def _right(self, handle: CacheHandle, pool: str, position: int, tokens: Sequence[int]) -> Cell:
        """What belongs at a position for this request. Without reuse, holes are what a window leaves behind."""
        holding, cell = handle.holdings[pool], tuple(tokens[: position + self.cache.pools[pool].spec.span + 1])
        complete = holding.hole is None or position < holding.hole.start or not holding.reuse
        return cell if complete else (*cell, INCOMPLETE)

    def put(self, handle: CacheHandle, pool: str, slot: int, cell: Cell) -> None:
        """Computes one slot from these very tokens, whatever its number. It must be the request's own."""
        assert slot >= handle.held(pool), f"slot {slot} lies in a shared block"
        size = self.cache.pools[pool].spec.block_size
        self.cells[pool, handle.block_table(pool)[slot // size], slot % size] = cell

    def move(self, handle: CacheHandle, pool: str, source: int, slot: int) -> None:
        """Copies the KV of one of the request's own slots to another."""
        cell = self.read(handle, pool, source)
        assert cell is not None
        self.put(handle, pool, slot, cell)

    def check_handle(self, handle: CacheHandle) -> None:
        """Every position that the request counts as computed, or shares, holds the KV of its own tokens, as far as the
        pool's window sees it."""
        tokens = handle.tokens.tokens()
        for pool in handle.pools:
            spec, hole = self.cache.pools[pool].spec, handle.holdings[pool].hole or range(0)
            end = max(handle.cursor(pool), min(handle.held(pool), len(tokens) - spec.span))
            first = 0 if spec.window is None else max(0, handle.cursor(pool) - spec.window + 1)
            for position in range(first, end):
                cell = self.read(handle, pool, position)
                right = None if position in hole else self._right(handle, pool, position, tokens)
                assert cell == right, f"{handle.request_id} {pool} {position}: {cell}"

    def published(self, pool: str) -> Iterator[tuple[Run, int, Cell]]:
        """(run, position, cell) of every published cell."""
        size = self.cache.pools[pool].spec.block_size
        for run in self.cache.pools[pool].tree.runs():
            units = 0 if run.gone else len(run.units) // 4
            for index in range(units):
                block, offset = run.blocks[index // size], index % size
                yield run, run.start * size + index, self.cells[pool, block, offset]

    def check_published(self, salts: Iterable[bytes] = (b"",)) -> None:
        """Every published cell was computed from the tokens that its place in the tree stands for."""
        for pool in self.cache.pools:
            scopes = [self.cache.scope(pool, tenant_salt=salt) for salt in salts]
            for run, position, cell in self.published(pool):
                assert cell == _expected(run, position, cell, scopes), f"{pool} position {position} holds {cell}"

    def best_depth(self, handle: CacheHandle, pool: str) -> int:
        """Units of the request that published cells hold: what an exact match must find."""
        holding = handle.holdings[pool]
        span, root, tokens = holding.stream.span, holding.stream.root, tuple(handle.tokens.tokens())
        held = {
            position
            for run, position, cell in self.published(pool)
            if run.root == root and cell == tokens[: position + span + 1]
        }
        window = self.cache.pools[pool].spec.window or len(tokens) + 1
        depths = (position + 1 for position in held if held.issuperset(range(max(0, position - window + 2), position)))
        return max(depths, default=0)


def _expected(run: Run, position: int, cell: Cell, scopes: Sequence[ReuseScope]) -> Cell | None:
    """The tokens that belong at a position of the tree: the words on the path, below a root that fits the first
    ones."""
    span = scopes[0].span
    if len(cell) != position + span + 1 or not any(KeyStream(scope, cell).root == run.root for scope in scopes):
        return None
    words: list[int] = []
    above: Run | None = run
    while above is not None:
        words = memoryview(above.units).cast("I").tolist() + words
        above = above.parent
    return cell[:span] + tuple(words[: position + 1])


def make_pair(
    span: int = 1,
    block_size: int = 4,
    blocks: int = 64,
    coupling: Coupling = Coupling.JOINT,
    *,
    draft_block_size: int | None = None,
    draft_blocks: int | None = None,
    extra: Sequence[PoolSpec] = (),
) -> OracleTensors:
    """Oracle tensors over a new pair of pools; both alike unless the draft's differ."""
    draft = PoolSpec("draft", draft_block_size or block_size, draft_blocks or blocks, span)
    return OracleTensors(PairedCache(PoolSpec("target", block_size, blocks), draft, coupling, extra=extra))


def start(oracle: OracleTensors, prompt: Sequence[int], **options: Any) -> Sequencer:
    """A request that has claimed what is there. Options are those of `PairedCache.open`."""
    handle = oracle.cache.open("request", prompt, **options)
    request = Sequencer(oracle, handle, random.Random(0))
    request.claim()
    oracle.check_handle(handle)
    return request


def serve(oracle: OracleTensors, prompt: Sequence[int], answer: Sequence[int] = (0,), **options: Any) -> None:
    """Runs a request to its end."""
    request = start(oracle, prompt, **options)
    request.finish_prefill()
    request.say(answer)
    request.end()
    oracle.check_published({b"", options.get("tenant_salt", b"")})


class Sequencer:
    """Runs one request on a cache and its oracle, step by step, as an engine with a drafter would."""

    def __init__(self, oracle: OracleTensors, handle: CacheHandle, rng: random.Random, vocabulary: int = 3) -> None:
        self.oracle, self.cache, self.handle = oracle, oracle.cache, handle
        self.rng = rng
        self.vocabulary = vocabulary

    @property
    def tokens(self) -> list[int]:
        return self.handle.tokens.tokens()

    def claim(self, skip_gap: bool = False) -> None:
        """Claims, and carries the copies out."""
        self.oracle.copy(self.cache.claim(self.handle, skip_gap).copies)

    def _cursors(self) -> dict[str, int]:
        return {pool: self.handle.cursor(pool) for pool in self.handle.pools}

    def prefill(self, chunk: int) -> bool:
        """Computes up to `chunk` more known positions in every pool; False if there was no room."""
        tokens, cursors = self.tokens, self._cursors()
        ends = {}
        for pool, cursor in cursors.items():
            units = self.handle.holdings[pool].stream.n_units
            ends[pool] = min(cursor + chunk, units if pool != "target" else len(tokens))
        return self._run(tokens, {pool: max(cursors[pool], end) for pool, end in ends.items()}, [])

    def decode(self, drafts: int, accepted: int, scratch: int = 0) -> bool:
        """Verifies `drafts` random tokens of which the first `accepted` count, and appends one more token."""
        drafted = [self.rng.randrange(self.vocabulary) for _ in range(drafts)]
        return self.verify(drafted, [*drafted[:accepted], self.rng.randrange(self.vocabulary)], scratch)

    def verify(self, drafted: Sequence[int], new: Sequence[int], scratch: int = 0) -> bool:
        """A decode step over `drafted` tokens that turns out to yield `new` ones; the draft uses `scratch` slots
        more."""
        tokens, ends = self.tokens, {}
        reached = len(tokens) + len(new) - 1
        for pool in self.handle.pools:
            units = len(tokens) + len(new) - self.handle.holdings[pool].stream.span
            ends[pool] = max(self.handle.cursor(pool), min(units, reached))
        return self._run([*tokens, *drafted], ends, list(new), scratch)

    def finish_prefill(self) -> None:
        """Computes all that the known tokens determine. The pools must have room."""
        assert self.prefill(len(self.tokens))

    def say(self, tokens: Iterable[int]) -> None:
        """Decodes these very tokens, one a step. The pools must have room."""
        for token in tokens:
            assert self.verify((), (token,))

    def end(self) -> None:
        """Frees the request, its tail published."""
        self.cache.free(self.handle)

    def _run(self, tokens: list[int], ends: dict[str, int], new: list[int], scratch: int = 0) -> bool:
        """Reserves, writes (drafts and scratch slots too), appends and commits; the order of an engine's step."""
        handle, cursors = self.handle, self._cursors()
        widths = {pool: (len(tokens) if pool == "target" and new else ends[pool]) for pool in handle.pools}
        for pool in handle.pools[1:]:
            widths[pool] += scratch
        amounts = [max(0, widths[pool] - cursors[pool]) for pool in handle.pools]
        if self.cache.reserve(handle, *self.roles(amounts)) is None:
            return False
        self.oracle.write(handle, "target", cursors["target"], widths["target"], tokens)
        self.cache.append(handle, new)
        for pool in handle.pools[1:]:
            self.oracle.write(handle, pool, cursors[pool], ends[pool], self.tokens)
            self.oracle.write(handle, pool, ends[pool], widths[pool], ())
        computed = [ends[pool] - cursors[pool] for pool in handle.pools]
        self.cache.commit(handle, *self.roles(computed))
        return True

    def roles(self, amounts: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
        """Amounts of the handle's pools as the cache's methods take them: target, draft, extra ones."""
        named = dict(zip(self.handle.pools, amounts, strict=True))
        return named.pop("target"), named.pop("draft", 0), tuple(named.values())
