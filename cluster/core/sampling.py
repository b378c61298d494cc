"""How a request wants its tokens chosen. Values are checked at the edge, by the gateway, and trusted here."""

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """In which way a grammar is stated; the values are the names of the wire's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must look like. `text` is the schema, expression or grammar; a JSON object needs none."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy. A request without `seed` is given one when it is admitted.

    `max_tokens` counts generated tokens. `min_tokens` of them are generated before any stop condition holds.
    `logprobs` is the number of alternatives to report for each token; None reports nothing.
    With a `grammar`, stop tokens may be chosen only where the output is complete, and there are no stop strings,
    `ignore_eos` or `min_tokens`."""

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
    grammar: Grammar | None = None
