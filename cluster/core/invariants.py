"""The invariants of trees, pools and handles, checked from scratch.

Tests call this after every operation, the engine when idle in audit mode; the cost is that of looking at everything.
The numbers are the design's: I1 no block is lost or held twice, I2 users are holders, I3 and I4 cursors stay behind
computed and determined positions, I5 who isn't claimed holds nothing, I6 all pools of a request agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from cluster.core.block_pool import BlockPool
from cluster.core.handle import CacheHandle, HandleStatus
from cluster.core.holding import Holding
from cluster.core.prefix_tree import PrefixTree
from cluster.core.runs import Run, blocks_to, path_to


def check_pools(pools: Mapping[str, BlockPool], handles: Sequence[CacheHandle]) -> None:
    """Raises RuntimeError if any invariant is broken. `handles` are all that may hold blocks."""
    for name, pool in pools.items():
        holdings = [handle.holdings[name] for handle in handles if name in handle.holdings]
        _raise_for(f"pool {name!r}", _tree_problems(pool.tree))
        _raise_for(f"pool {name!r}", _pool_problems(pool, holdings))
    for handle in handles:
        for name, holding in handle.holdings.items():
            _raise_for(f"request {handle.request_id}, pool {name!r}", _holding_problems(handle, holding))


def _raise_for(where: str, problems: Iterable[str]) -> None:
    for problem in problems:
        raise RuntimeError(f"{where}: {problem}")


def _pool_problems(pool: BlockPool, holdings: Sequence[Holding]) -> Iterable[str]:
    published = [block for run in pool.tree.runs() if not run.gone for block in run.blocks]
    private = [block for holding in holdings for block in holding.own]
    if sorted([*pool.tree.free, *published, *private]) != list(range(pool.spec.num_blocks)):
        yield "a block is lost or held twice"
    users: Counter[int] = Counter()
    readers: Counter[int] = Counter()
    for holding in holdings:
        for run in path_to(holding.leaf) if holding.leaf is not None else ():
            users[id(run)] += 1
            readers[id(run)] += run.start >= holding.first or run.parent is None
    if any((run.users, run.readers) != (users[id(run)], readers[id(run)]) for run in pool.tree.runs()):
        yield "the users or readers of a run aren't the requests that hold it"
    meters = pool.meters()
    if not 0 <= meters.reserved <= meters.in_use or min(meters.free, meters.cached, meters.in_use) < 0:
        yield f"impossible meters {meters}"


def _tree_problems(tree: PrefixTree) -> Iterable[str]:
    cached = sum(len(run.blocks) for run in tree.runs() if not run.readers and not run.gone)
    used = sum(len(run.blocks) for run in tree.runs() if run.readers)
    if (cached, used) != (tree.cached, tree.used):
        yield f"counts {tree.cached} blocks cached and {tree.used} used, but holds {cached} and {used}"
    for run in tree.runs():
        yield from _run_problems(tree, run)


def _run_problems(tree: PrefixTree, run: Run) -> Iterable[str]:
    heads = [child.head for child in run.children]
    if heads != sorted(heads) or any(second.startswith(first) for first, second in pairwise(heads)):
        yield "heads of siblings are unsorted, or one is a prefix of another"
    if tree.evictable(run) != (not run.readers and not run.gone):
        yield "a run is read and evictable, or neither"
    if run.gone and (run.readers or not (run.users or run.children)):
        yield "a run without blocks is read, or nobody needs it"
    if not run.users and any(child.users or child.score > run.score for child in run.children):
        yield "a run would be evicted before its children"
    if any(child.parent is not run or child.start != run.start + len(run.blocks) for child in run.children):
        yield "a child doesn't follow on its parent"
    if (run.parent is None) != (not run.blocks) or not run.units.startswith(run.head):
        yield "a run without blocks isn't a root, or its units aren't its own"


def _holding_problems(handle: CacheHandle, holding: Holding) -> Iterable[str]:
    shared = [] if holding.leaf is None else blocks_to(holding.leaf)
    if shared[holding.first :] != holding.table[holding.first : holding.published]:
        yield "the block table disagrees with the tree"
    if holding.cursor > min(holding.capacity, holding.stream.n_units):
        yield "the cursor is ahead of what is reserved or known"
    hole, size = holding.hole, holding.block_size
    if hole is not None and (
        hole.start != holding.held
        or set(holding.table[hole.start // size : hole.stop // size]) != {holding.pool.spec.num_blocks}
    ):
        yield "a hole isn't between what is published and what is the request's own"
    if handle.status is not HandleStatus.CLAIMED and (holding.table or holding.cursor or handle.reservation):
        yield f"it is {handle.status} but holds blocks"
