"""Verification of drafts, a chain or a tree, by comparison with what the target itself samples.

The target scores the last known token and every draft in one forward, each seeing its own ancestors only. From the last
known token on, its logits are sampled as in plain decoding, and the sampled token names the child to go to; where no
child has that token, it is the last one of the step.

Why this is lossless: the sampler's choice at position p is a function of the target's logits given the true tokens
before p, the seed and p (`cluster.engine.sampler`). The walk starts at the last known token and goes from a node to a
child only if the child's token is the one sampled there, so by induction every row that it uses saw the true prefix, at
the true position, and its token is the one that plain decoding gives with the same seed. What is off the walk, how the
drafts were made, how many siblings a node has, and whether their choice used the very same random numbers can't matter
(Daliri, Musco and Suresh 2024, drafter-invariant speculative decoding). A chain is a tree whose nodes have one child
each.

The trade-off: rejection sampling (Leviathan et al. 2023) accepts a draft with probability 1 - TV(p, q), the best
possible for a single draft, but its output depends on the drafter, so that a seed means nothing once speculation,
batching or a resumed request changes the drafts; with several children it takes one correction a child. Here a drafter
that races with the same clocks on its own distribution agrees with probability at least (1 - TV) / (1 + TV), one that
drafts greedily with probability p(draft), and siblings simply add up: a node goes on with the probability that any of
its children is the token sampled. Greedy decoding is the same in both.
"""

from cluster.core.drafts import Drafts


class Walk:
    """A walk along the target's choices. `path` are the nodes of the drafts accepted so far; `tokens` are the choices:
    those of the nodes, and in the end one more."""

    def __init__(self, drafts: Drafts) -> None:
        nodes = reversed(list(enumerate(zip(drafts.parents, drafts.tokens, strict=True))))
        self._children = {place: node for node, place in nodes}  # the first one, should two say the same
        self.path: list[int] = []
        self.tokens: list[int] = []

    @property
    def node(self) -> int | None:
        """Where the walk is: at the last known token if None."""
        return self.path[-1] if self.path else None

    def step(self, token: int) -> bool:
        """The target chooses `token` after the node; whether there is a draft of it to go to."""
        child = self._children.get((self.node, token))
        self.tokens.append(token)
        if child is None:
            return False
        self.path.append(child)
        return True
