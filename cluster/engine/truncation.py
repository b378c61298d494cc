"""Which tokens may be sampled at all: top-k, then top-p over what top-k left, then min-p.

Invariant: the kept set is a function of one row and its parameters (never of the batch), and equal scores are kept or
dropped together by top-k and min-p, and by token id in top-p. Called by `sampler` only.
"""

import numpy as np
import numpy.typing as npt

from cluster.core.sampling import SamplingParams

Scores = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

# Top-p looks at so many of the best tokens before it pays for a sort of the whole vocabulary.
_HEADS = (256, 4096)


def kept_tokens(scores: Scores, params: SamplingParams) -> TokenIds | None:
    """Ids, ascending, of the tokens that survive; None means all. `scores` [V]: logits divided by the temperature."""
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    if top_k is None and top_p >= 1.0 and min_p <= 0.0:
        return None
    best = float(scores.max())
    floor = -np.inf
    if top_k is not None and 0 < top_k < len(scores):
        floor = float(np.partition(scores, len(scores) - top_k)[len(scores) - top_k])
    kept = np.flatnonzero((scores >= floor) & (scores > -np.inf))
    if top_p < 1.0:
        kept = _nucleus(scores, kept, top_p, best)
    if min_p > 0.0:
        kept = kept[scores[kept] >= best + np.log(min_p)]
    return kept


def _nucleus(scores: Scores, kept: TokenIds, top_p: float, best: float) -> TokenIds:
    """The fewest best tokens of `kept` whose probability among `kept` reaches `top_p` (Holtzman et al. 2020)."""
    wanted = top_p * float(np.exp(scores[kept] - best).sum(dtype=np.float64))
    for size in (*_HEADS, len(kept)):
        candidates = _head(scores, kept, size)
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        mass = np.cumsum(np.exp(scores[order] - best), dtype=np.float64)
        if mass[-1] >= wanted:
            return np.sort(order[: int(np.searchsorted(mass, wanted)) + 1])
    return kept  # rounding left the whole mass a hair under `wanted`


def _head(scores: Scores, kept: TokenIds, size: int) -> TokenIds:
    """The `size` best of `kept`, and whatever ties with the last of them."""
    if len(kept) <= size:
        return kept
    held = scores[kept]
    best: TokenIds = kept[held >= np.partition(held, len(held) - size)[len(held) - size]]
    return best
