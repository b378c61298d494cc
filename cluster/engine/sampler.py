"""Chooses the next token of every row of logits, by greedy choice or by a race that is keyed by position.

The race: a token of probability p waits an exponential time with rate p, and the first to arrive is chosen; it is
token i with probability p_i. Its clocks come from a counter-based generator keyed by (seed of the request, absolute
position of the token), so the choice is a function of the row's logits, the seed and the position, and of nothing
else.

Invariant: the same logits, parameters, history, seed and position give the same token, in any batch, drafted or not.
`cluster.speculation.verify` rests on it. Called by the step loop for the target, and by drafters for their own logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.core.sampling import SamplingParams
from cluster.engine.penalties import apply_history, needs_history
from cluster.engine.truncation import TokenIds, kept_tokens

# Below this the float32 quotient overflows; the choice has long been greedy.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled with.

    `position` is the absolute index, in prompt + output, of the token that is about to be chosen. The history is three
    sequences, so that callers need not copy: `prompt`, `output` (committed), and the `drafts` that precede this row.
    Where `allowed` [V] is given, no other tokens are chosen, and truncation and probabilities are over these alone.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    drafts: Sequence[int] = ()
    allowed: npt.NDArray[np.bool_] | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are judged as they are."""
        return self.allowed is None and not needs_history(self.params)

    def judge(self, scores: npt.NDArray[np.float32], stop_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """`scores` [V] after penalties, as a copy, with minus infinity for tokens that mustn't be chosen."""
        if needs_history(self.params):
            scores = apply_history(scores, self.params, self.prompt, (*self.output, *self.drafts), stop_ids)
        return scores if self.allowed is None else np.where(self.allowed, scores, np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: before penalties, temperature and truncation, as in vLLM and
    the OpenAI API. `top` holds the `params.logprobs` likeliest tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry a row. A token is None where the logits were NaN or infinite, or left none of the allowed tokens any
    chance: only that request has failed."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class Sampler:
    """`vocab_size` counts the real tokens: columns beyond it are padding and are never chosen."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampleResult:
        """`logits` [R, V] float32, V >= vocab_size, one row for each of `rows`. Raises ValueError for other shapes."""
        if logits.ndim != 2 or logits.shape[0] != len(rows) or logits.shape[1] < self.vocab_size:
            raise ValueError(f"logits are {tuple(logits.shape)}, expected ({len(rows)}, at least {self.vocab_size})")
        logits = logits[:, : self.vocab_size]
        best, greedy = logits.max(dim=-1)
        # max() hands on NaN and +inf; a few -inf are a model's own mask
        finite = [math.isfinite(score) for score in best.tolist()]
        tokens = [token if usable else None for token, usable in zip(greedy.tolist(), finite, strict=True)]
        others = [i for i, row in enumerate(rows) if finite[i] and (row.params.temperature > 0 or not row.plain)]
        if others:  # one copy to the host for all of them
            for i, scores in zip(others, logits[others].cpu().numpy(), strict=True):
                tokens[i] = self._choose(scores, rows[i])
        logprobs = tuple(
            None if token is None or row.params.logprobs is None else _logprobs(logits[i], token, row.params.logprobs)
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
        )
        return SampleResult(tuple(tokens), logprobs)

    def _choose(self, scores: npt.NDArray[np.float32], row: SampleRow) -> int | None:
        params = row.params
        scores = row.judge(scores, self.eos_ids)
        if scores.max() == -np.inf:
            return None
        if params.temperature <= 0:
            return int(scores.argmax())
        scores = (scores - scores.max()) / max(params.temperature, LEAST_TEMPERATURE)
        kept = kept_tokens(scores, params)
        times = arrival_times(row.seed, row.position, self.vocab_size, kept)
        # argmax of p / time, in logarithms; softmax's normaliser is the same for all and is left out.
        if kept is None:
            return int(np.argmax(scores - np.log(times)))
        return int(kept[np.argmax(scores[kept] - np.log(times))])


def arrival_times(seed: int, position: int, vocab_size: int, kept: TokenIds | None = None) -> npt.NDArray[np.float32]:
    """Independent Exp(1) variables, one for each token (or each of `kept`), for one position of one request.

    Seeds count modulo 2**64. From raw Philox words (Salmon et al. 2011), whose stream numpy keeps stable across
    versions. u = (word + 1/2) / 2**32 and -log(1 - u): float32 resolves small u, and the smallest times decide the
    race.
    """
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw((vocab_size + 1) // 2).view(np.uint32)[:vocab_size]
    uniform = (words if kept is None else words[kept]).astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(-(2.0**-32))
    with np.errstate(divide="ignore"):  # u may round to 1: an infinite time never wins
        times: npt.NDArray[np.float32] = -np.log1p(uniform)
    return times


def _logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    logits = logits - logits.logsumexp(dim=-1)
    values, ids = logits.topk(min(count, logits.shape[-1]))
    return TokenLogprobs(token, float(logits[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
