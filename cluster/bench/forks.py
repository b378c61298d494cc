"""What exact span keys are worth: reuse and wrong draft cells on prompts that fork around block ends.

Four schemes decide how much of its draft KV a request may reuse:

    exact             ours: units with the span's lookahead, compared in full, partial blocks copied
    backoff           raw keys, and the last D tokens of a match not used
    drop_block        raw keys, and the last matched block not used
    shared_lookahead  the span's keys for the target too, so that plain and speculative requests share nothing

A reused draft cell is wrong if any of the tokens 0..i+D that it was computed from isn't the request's. Cells are
simulated: each holds the tokens it was computed from. Pure; called by `core.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCHEMES = ("exact", "backoff", "drop_block", "shared_lookahead")
_Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Forked:
    """One request of the workload; a plain one doesn't speculate."""

    tokens: _Tokens
    plain: bool


@dataclass(frozen=True)
class Outcome:
    """`reuse`: positions that both pools (or a plain request's one) could start behind, over all positions.
    `wrong_cells`: share of the reused draft cells that are wrong."""

    reuse: float
    wrong_cells: float


def workload(seed: int = 0, families: int = 24, size: int = 12, block: int = 16, plain: float = 0.25) -> list[Forked]:
    """Conversations of two turns, in families with a shared beginning that ends within a few tokens of a block's
    end."""
    rng = random.Random(seed)
    first, second = [], []
    for _ in range(families):
        shared = _text(rng, block * rng.randint(2, 8) + rng.randint(-3, 3))
        for _ in range(size):
            fork = len(shared) - rng.choice((0, 0, 0, 1, 2, block))
            tokens = (*shared[:fork], *_text(rng, rng.randint(8, 40)))
            is_plain = rng.random() < plain
            first.append(Forked(tokens, is_plain))
            second.append(Forked((*tokens, *_text(rng, rng.randint(20, 60))), is_plain))
    rng.shuffle(first)
    rng.shuffle(second)
    return first + second


def _text(rng: random.Random, tokens: int) -> _Tokens:
    return tuple(rng.randrange(1000) for _ in range(tokens))


def compare(requests: Sequence[Forked], span: int = 1, block: int = 16) -> dict[str, Outcome]:
    """Each scheme on the same requests, in pools without limits."""
    return {scheme: _Simulation(scheme, span, block).run(requests) for scheme in SCHEMES}


class _Simulation:
    """A pool is a dictionary from a key to the cell under it; keys are prefixes, so there are no collisions to
    consider."""

    def __init__(self, scheme: str, span: int, block: int) -> None:
        self._scheme = scheme
        self._span = span
        self._block = block
        self._target: set[tuple[bool, _Tokens]] = set()
        self._draft: dict[_Tokens, _Tokens] = {}

    def run(self, requests: Sequence[Forked]) -> Outcome:
        reused = cells = wrong = 0
        for request in requests:
            depth = self._depth(request)
            reused += depth
            if not request.plain:
                cells += depth
                wrong += sum(self._is_wrong(request.tokens, position) for position in range(depth))
            self._publish(request, depth)
        total = sum(len(request.tokens) for request in requests)
        return Outcome(reused / total, wrong / cells if cells else 0.0)

    def _depth(self, request: Forked) -> int:
        """Positions reused, in the target and (if it speculates) in the draft."""
        tokens = request.tokens
        target = _run_length(self._target_key(request, i) in self._target for i in self._positions(request))
        depth = min(target, len(tokens) - 1)
        if not request.plain:
            depth = min(depth, _run_length(self._draft_key(tokens, i) in self._draft for i in range(depth)))
        if self._scheme in ("exact", "shared_lookahead"):
            return depth
        whole = depth // self._block * self._block
        if request.plain:
            return whole
        return max(0, whole - (self._span if self._scheme == "backoff" else self._block))

    def _positions(self, request: Forked) -> range:
        return range(len(request.tokens) - self._lookahead(request))

    def _lookahead(self, request: Forked) -> int:
        """Tokens beyond its position that a target key covers."""
        return self._span if self._scheme == "shared_lookahead" and not request.plain else 0

    def _target_key(self, request: Forked, position: int) -> tuple[bool, _Tokens]:
        lookahead = self._lookahead(request)
        return lookahead > 0, request.tokens[: position + lookahead + 1]

    def _draft_key(self, tokens: _Tokens, position: int) -> _Tokens:
        exact = self._scheme in ("exact", "shared_lookahead")
        return tokens[: position + self._span + 1] if exact else tokens[: position + 1]

    def _is_wrong(self, tokens: _Tokens, position: int) -> bool:
        return self._draft[self._draft_key(tokens, position)] != tokens[: position + self._span + 1]

    def _publish(self, request: Forked, depth: int) -> None:
        """Adds what was computed; a block that is there already stays, with the cells of whoever came first."""
        tokens = request.tokens
        self._target |= {self._target_key(request, i) for i in self._positions(request)}
        if request.plain:
            return
        for position in range(depth, len(tokens) - self._span):
            self._draft.setdefault(self._draft_key(tokens, position), tokens[: position + self._span + 1])


def _run_length(hits: Iterator[bool]) -> int:
    """How many of the first are true."""
    count = 0
    for hit in hits:
        if not hit:
            break
        count += 1
    return count
