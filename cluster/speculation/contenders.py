"""Which tokens the target is likeliest to choose at a place, and how likely: what the branches of a tree are made from.

Invariant: a bad guess costs speed only, since verification takes nothing from it. Called by the tree drafter.

Why these scores. Take the target's logits to be the draft's plus a Gumbel error of scale 1 each. Decoding greedily, the
target then chooses token i with probability softmax(logits)_i, which is EAGLE-2's score. Sampling, it chooses the token
with the largest logits_i / T - log(time_i) among those that truncation keeps, by clocks that are known in advance, for
they depend on seed and position only (`cluster.engine.sampler`); so it is token i with probability
softmax(logits - T log(time))_i. But drafts err most in the tail, where now and then a clock favours a token that the
target thinks nothing of. So half of a token's score is from the race and half from the draft's own ranking, in which
clocks have no part: two children are then mostly the winner of the race and the likeliest token. Measured in tokens a
step, trees of 8 tokens, depth 3, T = 1: a fair draft (SmolLM2-135M's) 1.75 by both, 1.75 by the race, 1.64 by ranking
alone; a poor one (the tests' tiny EAGLE3) 1.93, 1.85 and 1.96.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.engine.sampler import LEAST_TEMPERATURE, Sampler, SampleRow, arrival_times
from cluster.engine.truncation import kept_tokens

Contender = tuple[int, float]
"""A token, and the natural logarithm of the probability that the target chooses it."""


def contenders(sampler: Sampler, logits: Tensor, rows: Sequence[SampleRow], count: int) -> list[list[Contender]]:
    """The `count` likeliest choices at each row, best first; fewer where fewer tokens exist or may be chosen.

    `logits` [R, V], V at least the target's vocabulary, are the draft's, one row for each of `rows`. Where they aren't
    finite there are none.
    """
    scores = logits[:, : sampler.vocab_size].float().clone()
    for i, row in enumerate(rows):
        if not row.plain:
            scores[i] = torch.from_numpy(row.judge(scores[i].cpu().numpy(), sampler.eos_ids))
    log_probs = torch.log_softmax(scores, dim=-1)
    hot = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if hot:
        race = torch.log_softmax(_race(scores[hot], [rows[i] for i in hot]), dim=-1)
        log_probs[hot] = torch.logaddexp(log_probs[hot], race) - math.log(2)
    values, ids = log_probs.topk(min(count, log_probs.shape[1]))
    return [
        [(token, min(0.0, value)) for token, value in zip(*pair, strict=True) if value > -math.inf]
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _race(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[R, V], what the tokens race with: -inf where truncation leaves them out. Siblings have the same clocks."""
    clocks: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    for place in {(row.seed, row.position) for row in rows}:
        clocks[place] = np.log(arrival_times(*place, scores.shape[1]))
    times = torch.from_numpy(np.stack([clocks[row.seed, row.position] for row in rows])).to(scores.device)
    heat = torch.tensor([[max(row.params.temperature, LEAST_TEMPERATURE)] for row in rows], device=scores.device)
    race = scores - heat * times
    scaled = ((scores - scores.amax(dim=-1, keepdim=True)) / heat).cpu().numpy()
    for i, row in enumerate(rows):
        kept = kept_tokens(scaled[i], row.params) if np.isfinite(scaled[i].max()) else None
        if kept is not None:
            left = torch.from_numpy(kept).to(scores.device)
            race[i] = torch.full_like(race[i], -torch.inf).index_copy_(0, left, race[i, left])
    return race
