"""How long property tests run: enough steps in CI, a multiple of that where TEST_EFFORT asks for it."""

import os

from hypothesis import HealthCheck, Phase, settings

EFFORT = float(os.environ.get("TEST_EFFORT", "1"))


def steps(count: int, per_example: int = 50) -> settings:
    """Settings under which a state machine of `per_example` steps makes about `count` steps in all."""
    examples = max(1, round(EFFORT * count / per_example))
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],  # slow, and a seed explains nothing
        print_blob=True,
    )
