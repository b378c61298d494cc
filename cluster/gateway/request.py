"""A request as a client wrote it, whatever the protocol: what the validator reads.

Invariant: immutable, unchecked, and None wherever the client said nothing; defaults belong to the validator.
Made by `cluster.rpc.convert` (gRPC) and by the HTTP edge.
"""

from dataclasses import dataclass, field

from cluster.core.sampling import Grammar


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template renders."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling parameters; each one's meaning is in `proto/tandem/v1/tandem.proto`."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class RequestFields:
    """One request to generate."""

    prompt: Prompt | None
    sampling: SamplingFields = field(default_factory=SamplingFields)
    model: str = ""
    request_id: str = ""
    priority: int | None = None
    speculate: bool | None = None
    reuse: bool | None = None
    worker_id: str = ""
