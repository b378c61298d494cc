"""When requests arrive: conversations spread over a run whose rate loads the simulated cluster to a given degree.

The rate follows from the work itself: `load` is the share of the cluster's time that it would need if every block were
computed once and reused by all that follow, with decoding in batches of `DECODE_BATCH`. A router that reuses less or
balances worse drives the same cluster closer to, or beyond, what it can do. Used by the generators and the traces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.bench.route.request import SimRequest
from cluster.bench.route.timing import StepTimes

DECODE_BATCH = 16
_SESSION_SHARE = 0.3
"""A conversation of several turns lasts for about this share of the run."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, before it is known when it is sent. Blocks as in `SimRequest`."""

    prompt_tokens: int
    output_tokens: int
    prompt: tuple[int, ...]
    whole: tuple[int, ...]
    speculative: bool = True
    acceptance: float = 2.4


Session = Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a cluster: how many requests, of how many workers, at which load."""

    requests: int
    workers: int
    load: float
    times: StepTimes = field(default_factory=StepTimes)


def spread(sessions: Sequence[Session], demand: Demand, block_size: int, rng: random.Random) -> tuple[SimRequest, ...]:
    """Sessions begin at random (a Poisson process of known length); a turn follows the one before it after an
    exponentially distributed pause. Turns that would come after the end of the run aren't sent."""
    turns = [turn for session in sessions for turn in session]
    length = len(turns) / rate(turns, demand, block_size)
    sent: list[tuple[float, int, Turn]] = []
    for number, session in enumerate(sessions):
        at = rng.uniform(0.0, length)
        pause = _SESSION_SHARE * length / len(session)
        for turn in session:
            sent.append((at, number, turn))
            at += rng.expovariate(1.0 / pause)
    return tuple(
        as_request(number, at, session, turn)
        for number, (at, session, turn) in enumerate(sorted(each for each in sent if each[0] < length))
    )


def as_request(number: int, at: float, session: int, turn: Turn) -> SimRequest:
    return SimRequest(
        number,
        at,
        turn.prompt_tokens,
        turn.output_tokens,
        turn.prompt,
        turn.whole,
        session,
        turn.speculative,
        turn.acceptance,
    )


def rate(turns: Iterable[Turn], demand: Demand, block_size: int) -> float:
    """Requests a second that load the cluster as demanded."""
    known: set[int] = set()
    count, work_ms = 0, 0.0
    for turn in turns:
        count += 1
        reused = min(_leading(turn.prompt, known) * block_size, turn.prompt_tokens - 1)
        known.update(turn.whole)
        work_ms += demand.times.prefill_ms(reused, turn.prompt_tokens - reused) + _decode_ms(turn, demand.times)
    return demand.load * demand.workers * 1000.0 * count / work_ms


def _decode_ms(turn: Turn, times: StepTimes) -> float:
    steps = turn.output_tokens / (turn.acceptance if turn.speculative else 1.0)
    return steps * (times.step_ms / DECODE_BATCH + times.decode_ms(1, 0, turn.prompt_tokens))


def _leading(chain: Sequence[int], known: set[int]) -> int:
    for depth, block in enumerate(chain):
        if block not in known:
            return depth
    return len(chain)
