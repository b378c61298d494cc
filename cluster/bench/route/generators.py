"""Made-up workloads, each with one thing that makes routing hard.

    chat      conversations of several turns over a few short system prompts: reuse is private to a session
    agents    long system prompts shared by many sessions, whose calls follow each other and grow fast
    hot       a few long documents, asked about very unevenly, among unrelated prompts
    forks     prompts that part at every depth, at block ends: a tree of shared beginnings
    tenants   tenants of very different size, each with its own prompts; some never speculate
    mixed     documents with readers that speculate and readers that don't: draft pools hold less than target pools

All are made from one random source: equal seeds, equal workloads. Called by `matrix`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from cluster.bench.route.arrivals import Demand, Session, Turn, spread
from cluster.bench.route.request import BlockNumbers, Workload

BLOCK = 128


class _Text:
    """A conversation's tokens so far: whole blocks that may be shared, and then its own."""

    def __init__(self, numbers: BlockNumbers, shared: Sequence[int]) -> None:
        self._numbers = numbers
        self._blocks = list(shared)
        self._tokens = len(shared) * BLOCK

    def turn(self, asked: int, answered: int, speculative: bool, acceptance: float) -> Turn:
        """Appends a question and its answer."""
        prompt_tokens = self._tokens + asked
        self._tokens = prompt_tokens + answered
        self._blocks += self._numbers.fresh(self._tokens // BLOCK - len(self._blocks))
        whole = tuple(self._blocks)
        return Turn(prompt_tokens, answered, whole[: prompt_tokens // BLOCK], whole, speculative, acceptance)


class Maker:
    """Draws sessions of a workload until there are enough requests."""

    def __init__(self, demand: Demand, rng: random.Random) -> None:
        self.demand = demand
        self.rng = rng
        self.numbers = BlockNumbers()

    def workload(self, name: str, sessions: Iterator[Session]) -> Workload:
        drawn, turns = list[Session](), 0
        while turns < self.demand.requests:
            session = next(sessions)
            drawn.append(session)
            turns += len(session)
        return Workload(name, BLOCK, spread(drawn, self.demand, BLOCK, self.rng))

    def around(self, median: float, sigma: float = 0.6) -> int:
        """A token count, log-normal around the median."""
        return max(1, round(self.rng.lognormvariate(0.0, sigma) * median))

    def acceptance(self) -> float:
        return self.rng.uniform(2.0, 2.8)

    def shared(self, tokens: int) -> tuple[int, ...]:
        """The blocks of a text that many prompts begin with."""
        return self.numbers.fresh(tokens // BLOCK)

    def conversation(
        self, shared: Sequence[int], turns: int, asked: float, answered: float, speculates: Callable[[], bool]
    ) -> Session:
        text = _Text(self.numbers, shared)
        return [
            text.turn(self.around(asked), self.around(answered), speculates(), self.acceptance()) for _ in range(turns)
        ]


def chat(make: Maker) -> Iterator[Session]:
    systems = [make.shared(make.around(600, 0.3)) for _ in range(8)]
    while True:
        turns = min(12, 1 + int(make.rng.expovariate(0.25)))
        yield make.conversation(make.rng.choice(systems), turns, 600, 250, _always)


def agents(make: Maker) -> Iterator[Session]:
    systems = [make.shared(make.around(6000, 0.3)) for _ in range(12)]
    while True:
        yield make.conversation(make.rng.choice(systems), make.rng.randint(4, 12), 800, 100, _always)


def hot(make: Maker) -> Iterator[Session]:
    documents = [make.shared(make.around(10_000, 0.3)) for _ in range(12)]
    weights = list(accumulate(1.0 / rank for rank in range(1, 13)))
    while True:
        is_hot = make.rng.random() < 0.8
        shared = make.rng.choices(documents, cum_weights=weights)[0] if is_hot else ()
        yield make.conversation(shared, 1, 300 if is_hot else 3000, 200, _always)


def forks(make: Maker) -> Iterator[Session]:
    roots = [make.shared(make.around(2500, 0.3)) for _ in range(max(8, make.demand.workers // 2))]
    branches: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    while True:
        path = make.rng.choice(roots)
        for _ in range(make.rng.randint(1, 3)):
            children = branches.setdefault(path, [])
            if len(children) < 3:
                children.append((*path, *make.shared(make.around(1200, 0.3))))
            path = make.rng.choice(children)
        yield make.conversation(path, 1, 300, 150, _always)


def tenants(make: Maker) -> Iterator[Session]:
    count = 24
    systems = [make.shared(make.around(3000, 0.8)) for _ in range(count)]
    weights = list(accumulate(1.0 / rank for rank in range(1, count + 1)))
    plain = [make.rng.random() < 0.3 for _ in range(count)]
    while True:
        tenant = make.rng.choices(range(count), cum_weights=weights)[0]
        speculates = _never if plain[tenant] else _always
        yield make.conversation(systems[tenant], make.rng.randint(1, 5), 700, 200, speculates)


def mixed(make: Maker) -> Iterator[Session]:
    while True:
        document = make.shared(make.around(6000, 0.4))
        readers = [False] * make.rng.randint(2, 4) + [True] * make.rng.randint(2, 4)
        for speculates in readers:
            turns = make.rng.randint(1, 3)
            yield make.conversation(document, turns, 400, 150, _always if speculates else _never)


GENERATORS: dict[str, Callable[[Maker], Iterator[Session]]] = {
    "chat": chat,
    "agents": agents,
    "hot": hot,
    "forks": forks,
    "tenants": tenants,
    "mixed": mixed,
}


def generate(name: str, demand: Demand, rng: random.Random) -> Workload:
    make = Maker(demand, rng)
    return make.workload(name, GENERATORS[name](make))


def _always() -> bool:
    return True


def _never() -> bool:
    return False
