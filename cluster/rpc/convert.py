"""Core values to wire messages and back.

Invariant: every field of a message that a function here makes comes from a field of the same meaning, and what was set
to 0 stays distinct from what was not set. Called by the worker's service and the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams
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
    return tandem_pb2.SamplingParams(**{name: value for name, value in asdict(params).items() if value is not None})


def sampling_from_wire(message: tandem_pb2.SamplingParams) -> SamplingParams:
    """The inverse of `sampling_to_wire`. The message was made by a gateway, so it is complete."""
    return SamplingParams(**set_fields(message))


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
