"""How well placements predict reuse: what the scheduler expected against what the workers' first claims found.

Workers report whole blocks, and reuse a part of one more where they hold it, token by token. So a prediction is right
if as many whole blocks were reused as it says, in every pool.

Invariant: counts every request that a worker ran to its end, once. Each request's difference is logged as
`route_predicted_minus_actual_tokens`; the sums are for the cluster's status. Owned by `cluster.gateway.generation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.frontier import Frontier


@dataclass(frozen=True, slots=True)
class RoutingAccuracy:
    """Sums over the requests since this gateway started."""

    requests: int = 0
    equal: int = 0
    """Those of which exactly as many whole blocks were reused as was expected, in every pool."""
    too_high_tokens: int = 0
    """Prompt tokens expected and not reused: their entries were stale, or evicted on the way."""
    too_low_tokens: int = 0
    """Prompt tokens reused beyond what was expected: parts of blocks, or reports that were under way."""

    def with_request(self, expected: Frontier, found: Frontier, block_size: int) -> RoutingAccuracy:
        difference = expected.joint - found.joint
        return RoutingAccuracy(
            self.requests + 1,
            self.equal + (_blocks(expected, block_size) == _blocks(found, block_size)),
            self.too_high_tokens + max(0, difference),
            self.too_low_tokens + max(0, -difference),
        )


def _blocks(frontier: Frontier, block_size: int) -> tuple[int, int]:
    return frontier.target // block_size, (frontier.draft or 0) // block_size
