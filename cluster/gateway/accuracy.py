"""How well placements predict reuse: what the scheduler expected against what the workers' first claims found.

Invariant: counts every request that a worker ran to its end, once. Each request's difference is logged as
`route_predicted_minus_actual_tokens`; the sums are for the cluster's status. Owned by `cluster.gateway.generation`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingAccuracy:
    """Sums over the requests since this gateway started."""

    requests: int = 0
    equal: int = 0
    """Those of which exactly as many tokens were reused as was expected, in every pool."""
    too_high_tokens: int = 0
    """Prompt tokens expected and not reused: their entries were stale, or evicted on the way."""
    too_low_tokens: int = 0
    """Prompt tokens reused beyond what was expected: reports were under way."""

    def with_request(self, difference: int, equal: bool) -> RoutingAccuracy:
        """`difference` is predicted minus actual, in tokens reused jointly."""
        return RoutingAccuracy(
            self.requests + 1,
            self.equal + equal,
            self.too_high_tokens + max(0, difference),
            self.too_low_tokens + max(0, -difference),
        )
