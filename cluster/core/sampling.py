"""How a request wants its tokens chosen. Values are checked at the edge, by the gateway, and trusted here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. A request without `seed` is given one when it is admitted.

    `max_tokens` counts generated tokens. `min_tokens` of them are generated before any stop condition holds.
    `logprobs` is the number of alternatives to report for each token; None reports nothing."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
