"""Verification of drafts, a chain or a tree, by comparison with what the target itself samples.

The target scores the last known token and every draft in one forward, each seeing its own ancestors only, and each of
these rows is sampled as in plain decoding. From the last known token on, the sampled token names the child to go to;
where no child has that token, it is the last one of the step.

Why this is lossless: the sampler's choice at position p is a function of the target's logits given the true tokens
before p, the seed and p (`cluster.engine.sampler`). The walk starts at the last known token and goes from a node to a
child only if the child's token is the one sampled there, so by induction every row that it uses saw the true prefix, at
the true position, and its token is the one that plain decoding gives with the same seed. Rows off the walk are never
looked at. How the drafts were made, how many siblings a node has, and whether their choice used the very same random
numbers can't matter (Daliri, Musco and Suresh 2024, drafter-invariant speculative decoding). A chain is a tree whose
nodes have one child each.

The trade-off: rejection sampling (Leviathan et al. 2023) accepts a draft with probability 1 - TV(p, q), the best
possible for a single draft, but its output depends on the drafter, so that a seed means nothing once speculation,
batching or a resumed request changes the drafts; with several children it takes one correction a child. Here a drafter
that races with the same clocks on its own distribution agrees with probability at least (1 - TV) / (1 + TV), one that
drafts greedily with probability p(draft), and siblings simply add up: a node goes on with the probability that any of
its children is the token sampled. Greedy decoding is the same in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.drafts import Drafts


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path` are the nodes of the accepted drafts; `tokens` are theirs and one more that the target sampled."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def verify(drafts: Drafts, sampled: Sequence[int]) -> Verdict:
    """`sampled[0]` is the target's choice after the last known token, `sampled[j + 1]` that after node j.

    Raises ValueError if there isn't one for each.
    """
    if len(sampled) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} sampled tokens, got {len(sampled)}")
    children = {
        place: node for node, place in reversed(list(enumerate(zip(drafts.parents, drafts.tokens, strict=True))))
    }
    path: list[int] = []
    tokens = [sampled[0]]
    node = children.get((None, sampled[0]))
    while node is not None:
        path.append(node)
        tokens.append(sampled[node + 1])
        node = children.get((node, sampled[node + 1]))
    return Verdict(tuple(path), tuple(tokens))
