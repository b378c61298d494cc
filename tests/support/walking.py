"""A finished walk over drafts, where the target's choices are known everywhere."""

from collections.abc import Sequence

from cluster.core.drafts import Drafts
from cluster.speculation.verify import Walk


def walked(drafts: Drafts, sampled: Sequence[int]) -> Walk:
    """`sampled[0]` is the target's choice after the last known token, `sampled[j + 1]` that after node j."""
    assert len(sampled) == len(drafts) + 1
    walk = Walk(drafts)
    while walk.step(sampled[0 if walk.node is None else walk.node + 1]):
        pass
    return walk
