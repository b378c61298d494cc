"""Which tokens the target is likeliest to choose at a place, and how likely: what the branches of a tree are made from.

Invariant: the best contender is what a chain would draft, the winner of the draft's own race; the guess may be bad, but
never costs more than speed, since verification takes nothing from it. Called by `cluster.speculation.tree`.

Why these scores. Take the target's logits to be the draft's plus a Gumbel error of scale 1 each. Decoding greedily, the
target then chooses token i with probability softmax(logits)_i, which is EAGLE-2's score. Sampling, it chooses the
largest of logits_i / T - log(time_i), with clocks that are known in advance, for they depend on seed and position only
(`cluster.engine.sampler`); so it is token i with probability softmax(logits - T log(time))_i. Alternatives are thereby
those that may win the very race that is on, where ranking by the draft's probabilities alone would put the same tokens
into every tree and miss what the clocks favour. Either is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.engine.penalties import apply_history, needs_history
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
    heads: dict[tuple[int, int, float], npt.NDArray[np.float32]] = {}
    for i, row in enumerate(rows):
        if row.params.temperature > 0:
            key = row.seed, row.position, row.params.temperature
            if key not in heads:
                heads[key] = _head_start(row, sampler.vocab_size)
            scores[i] = _raced(scores[i], row, sampler, heads[key])
        elif needs_history(row.params):
            scores[i] = _on(scores, _after_history(scores[i], row, sampler))
    finite = torch.isfinite(scores.max(dim=-1).values)
    values, ids = torch.log_softmax(scores, dim=-1).topk(min(count, scores.shape[1]))
    return [
        [(token, min(0.0, value)) for token, value in zip(*pair, strict=True) if value > -np.inf] if usable else []
        for usable, *pair in zip(finite.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]


def _head_start(row: SampleRow, vocab_size: int) -> npt.NDArray[np.float32]:
    """What the clocks of the row's position add to each token's logit [V]."""
    times = arrival_times(row.seed, row.position, vocab_size)
    head: npt.NDArray[np.float32] = np.float32(-row.params.temperature) * np.log(times)
    return head


def _raced(scores: Tensor, row: SampleRow, sampler: Sampler, head: npt.NDArray[np.float32]) -> Tensor:
    """Logits [V] after penalties and with the race's head starts."""
    params = row.params
    if params.top_k is None and params.top_p >= 1.0 and params.min_p <= 0.0 and not needs_history(params):
        return scores + _on(scores, head)
    held = _after_history(scores, row, sampler)
    kept = kept_tokens((held - held.max()) / np.float32(max(params.temperature, LEAST_TEMPERATURE)), params)
    if kept is None:
        return _on(scores, held + head)
    # Measured from the winner's head start. A token that the draft cuts off stands for a target that doesn't: for that
    # it must be likely, and being lucky is no help.
    head = head - head[kept[np.argmax(held[kept] + head[kept])]]
    helped = np.minimum(head, 0)
    helped[kept] = head[kept]
    return _on(scores, held + helped)


def _after_history(scores: Tensor, row: SampleRow, sampler: Sampler) -> npt.NDArray[np.float32]:
    held: npt.NDArray[np.float32] = scores.cpu().numpy()
    if not needs_history(row.params):
        return held
    return apply_history(held, row.params, row.prompt, (*row.output, *row.drafts), sampler.eos_ids)


def _on(scores: Tensor, values: npt.NDArray[np.float32]) -> Tensor:
    """`values` where `scores` are."""
    return torch.from_numpy(values).to(scores.device)
