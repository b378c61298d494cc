"""Short ways to write requests, workloads and workers of the simulation down."""

from collections.abc import Sequence

from cluster.bench.route.request import SimRequest, Workload
from cluster.bench.route.timing import StepTimes, WorkerSpec

BLOCK = 100
TIMES = StepTimes(
    step_ms=10.0,
    target_token_ms=1.0,
    target_context_ms=0.0,
    draft_token_ms=0.1,
    row_ms=1.0,
    kv_token_ms=0.0,
    draft_step_ms=5.0,
)
SPEC = WorkerSpec(times=TIMES, pool_tokens=10_000, token_budget=1000, max_running=4)


def request(
    number: int = 0,
    prompt: Sequence[int] = (),
    tail: int = 50,
    output: int = 1,
    at: float = 0.0,
    speculative: bool = True,
    session: int = 0,
) -> SimRequest:
    """A prompt of these full blocks and `tail` tokens more; two tokens a step if it speculates."""
    blocks = tuple(prompt)
    tokens = len(blocks) * BLOCK + tail
    return SimRequest(number, at, tokens, output, blocks, blocks, session, speculative, acceptance=2.0)


def workload(*requests: SimRequest) -> Workload:
    return Workload("test", BLOCK, requests)
