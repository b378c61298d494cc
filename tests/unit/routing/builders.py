"""Short ways to write workers, prompts and reports down."""

import hashlib
from collections.abc import Iterable, Sequence

from cluster.core.frontier import BlockState, FrontierReport
from cluster.core.handle import Coupling
from cluster.routing.types import DispatchQuery, ModelCard, WorkerInfo

BLOCK = 16
CARD = ModelCard("m", "fingerprint", "float32", BLOCK, max_len=4096, vocab_size=100)


def chain(*names: str | int) -> tuple[bytes, ...]:
    """Keys of consecutive blocks: each stands for its name and all before it."""
    keys, parent = [], b""
    for name in names:
        parent = hashlib.sha256(parent + str(name).encode()).digest()
        keys.append(parent)
    return tuple(keys)


def states(keys: Sequence[bytes], target: int | None = None, draft: int = 0) -> tuple[BlockState, ...]:
    """The chain's blocks, the first `target` (all, if None) of them in the target pool and `draft` in the draft
    pool."""
    target = len(keys) if target is None else target
    return tuple(
        BlockState(key, keys[depth - 1] if depth else None, depth, target=depth < target, draft=depth < draft)
        for depth, key in enumerate(keys)
        if depth < max(target, draft)
    )


def worker(
    name: str = "a",
    epoch: int = 1,
    coupling: Coupling = Coupling.JOINT,
    max_running: int = 4,
    max_queue: int = 4,
    card: ModelCard = CARD,
) -> WorkerInfo:
    return WorkerInfo(name, epoch, f"127.0.0.1:{epoch}", card, coupling, max_running, max_queue)


def report(
    name: str = "a",
    epoch: int = 1,
    seq: int = 1,
    stored: Iterable[BlockState] = (),
    removed: Iterable[bytes] = (),
    snapshot: bool = False,
) -> FrontierReport:
    return FrontierReport(
        worker=name, epoch=epoch, seq=seq, stored=tuple(stored), removed=tuple(removed), snapshot=snapshot
    )


def query(
    keys: tuple[bytes, ...] = (),
    request_id: str = "r",
    tail: int = 1,
    speculate: bool = True,
    exclude: frozenset[str] = frozenset(),
) -> DispatchQuery:
    """A prompt of these full blocks and `tail` tokens more."""
    return DispatchQuery(
        request_id, "m", keys, len(keys) * BLOCK + tail, 32, BLOCK, speculate=speculate, exclude=exclude
    )
