"""Core values to wire messages and back.

Invariant: every field of a message that a function here makes comes from a field of the same meaning, and what was set
to 0 stays distinct from what was not set. Called by the worker's service and the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from cluster.core.request import FinishReason
from cluster.core.sampling import Grammar, GrammarKind, SamplingParams
from cluster.errors import InvalidRequest
from cluster.rpc._generated.tandem.v1 import tandem_pb2

if TYPE_CHECKING:
    from cluster.engine.events import Usage
    from cluster.engine.sampler import TokenLogprobs

# Requests that end otherwise end with an error status.
FINISH_REASONS = {
    FinishReason.STOP: tandem_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tandem_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: tandem_pb2.FINISH_REASON_CANCELLED,
}


def set_fields(message: Message) -> dict[str, Any]:
    """The fields that `message` sets, by name; repeated ones as tuples."""
    return {field.name: tuple(value) if field.is_repeated else value for field, value in message.ListFields()}


def sampling_to_wire(params: SamplingParams) -> tandem_pb2.SamplingParams:
    """Every parameter but those that are None."""
    given = {field.name: getattr(params, field.name) for field in fields(params) if field.name != "grammar"}
    message = tandem_pb2.SamplingParams(**{name: value for name, value in given.items() if value is not None})
    if params.grammar is not None:
        message.structured_output.CopyFrom(grammar_to_wire(params.grammar))
    return message


def sampling_from_wire(message: tandem_pb2.SamplingParams) -> SamplingParams:
    """The inverse of `sampling_to_wire`. The message was made by a gateway, so it is complete."""
    return SamplingParams(**sampling_fields(message))


def sampling_fields(message: tandem_pb2.SamplingParams) -> dict[str, Any]:
    """The parameters that `message` sets, by their names in `SamplingParams`."""
    given = set_fields(message)
    structured = given.pop("structured_output", None)
    return given if structured is None else {**given, "grammar": grammar_from_wire(structured)}


def grammar_to_wire(grammar: Grammar) -> tandem_pb2.StructuredOutput:
    """The message that asks for output of this grammar."""
    form: dict[str, Any] = {grammar.kind: {} if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text}
    return tandem_pb2.StructuredOutput(**form)


def grammar_from_wire(message: tandem_pb2.StructuredOutput) -> Grammar:
    """The inverse of `grammar_to_wire`. Raises InvalidRequest for a message that names no form, or one that only a
    newer version knows: it must not pass for a request without conditions."""
    kind = message.WhichOneof("form")
    if kind is None:
        forms = f"one of {', '.join(GrammarKind)}"
        raise InvalidRequest("structured_output", "empty", forms, "set one of them, or leave it unset")
    return Grammar(GrammarKind(kind), "" if kind == GrammarKind.JSON_OBJECT else getattr(message, kind))


def logprobs_to_wire(logprobs: Iterable[TokenLogprobs]) -> list[tandem_pb2.TokenLogprobs]:
    """One message for each token."""
    return [
        tandem_pb2.TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            top=[tandem_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in each.top],
        )
        for each in logprobs
    ]


def completion_to_wire(finish: FinishReason, usage: Usage) -> tandem_pb2.Completion:
    """How a request ended, as its worker saw it: worker id and the gateway's timings are for the gateway to add."""
    return tandem_pb2.Completion(
        finish_reason=FINISH_REASONS[finish],
        usage=tandem_pb2.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens),
        reuse=tandem_pb2.Reuse(
            target_tokens=usage.reused_target, draft_tokens=usage.reused_draft, joint_tokens=usage.reused_joint
        ),
        speculation=tandem_pb2.SpeculationStats(
            steps=usage.draft_steps,
            drafted_tokens=usage.drafted,
            accepted_tokens=usage.accepted,
            mean_acceptance_length=usage.acceptance_length,
        ),
    )
