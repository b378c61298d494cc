"""What the tokens so far do to the logits of the next one: penalties, and the ban on stopping before `min_tokens`.

Invariant: the result depends on the row's own history only, which for a verification row includes the drafts before it,
so a token is judged by the same logits whether it was drafted or decoded plainly. Called by `sampler` only.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core.sampling import SamplingParams

Scores = npt.NDArray[np.float32]


def needs_history(params: SamplingParams) -> bool:
    """Whether `apply_history` may change anything for these parameters."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0 or params.min_tokens
    )


def apply_history(
    scores: Scores, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], stop_ids: Sequence[int]
) -> Scores:
    """`scores` [V] after the penalties, as a copy.

    `generated` are the tokens after the prompt; `stop_ids` may not be chosen while there are fewer than `min_tokens`
    of them. Repetition (Keskar et al. 2019, CTRL) counts the prompt too; presence and frequency count generated
    tokens only (as OpenAI defines them).
    """
    scores = scores.copy()
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.fromiter((*prompt, *generated), np.int64))
        held = scores[seen]
        scores[seen] = np.where(held > 0, held / params.repetition_penalty, held * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        seen, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
        scores[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if len(generated) < params.min_tokens:
        scores[[*stop_ids, *params.stop_token_ids]] = -np.inf
    return scores
