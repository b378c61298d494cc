"""Verification of a chain of drafts, by comparison with what the target itself samples.

The target scores the last known token and all K drafts in one forward, and each of the K+1 rows is sampled as in plain
decoding. Drafts are accepted up to the first that differs from the token sampled at its place.

Why this is lossless: the sampler's choice at position p is a function of the target's logits given the true tokens
before p, the seed and p (`cluster.engine.sampler`). A sampled token is used only if every draft before it equals the
sampled token there, that is, only if its row saw the true prefix. So the output is, token for token, the sequence
that plain decoding gives with the same seed; how the drafts were made, even from the same random numbers, can't
matter (Daliri, Musco and Suresh 2024, drafter-invariant speculative decoding).

The trade-off: rejection sampling (Leviathan et al. 2023) accepts a draft with probability 1 - TV(p, q), the best
possible, but its output depends on the drafter, so that a seed means nothing once speculation, batching or a resumed
request changes the drafts. Here a drafter that races with the same clocks on its own distribution agrees with
probability at least (1 - TV) / (1 + TV), and one that drafts greedily with probability p(draft). Greedy decoding is
the same in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` are the new tokens: the accepted drafts and one sampled by the target, `accepted` + 1 in all."""

    accepted: int
    tokens: tuple[int, ...]


def verify(drafts: Sequence[int], sampled: Sequence[int]) -> Verdict:
    """`sampled[j]` is the target's choice after the last known token and `drafts[:j]`; one more than drafts.

    Raises ValueError if there isn't.
    """
    if len(sampled) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} sampled tokens, got {len(sampled)}")
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return Verdict(accepted, tuple(sampled[: accepted + 1]))
