"""Conversions keep every field, and keep what is set to 0 apart from what is unset."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.request import FinishReason
from cluster.core.sampling import Grammar, GrammarKind, SamplingParams
from cluster.engine.events import Usage
from cluster.engine.sampler import TokenLogprobs
from cluster.errors import InvalidRequest
from cluster.gateway.convert import request_from_wire
from cluster.gateway.request import ChatMessage, ChatPrompt, RequestFields, SamplingFields, TextPrompt, TokenPrompt
from cluster.rpc import convert
from cluster.rpc._generated.tandem.v1 import tandem_pb2

small = st.integers(0, 2**31)
floats = st.floats(allow_nan=False)

params = st.builds(
    SamplingParams,
    max_tokens=small,
    temperature=floats,
    top_k=st.none() | small,
    top_p=floats,
    min_p=floats,
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
    stop_token_ids=st.lists(small).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=small,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logprobs=st.none() | small,
    grammar=st.none()
    | st.just(Grammar(GrammarKind.JSON_OBJECT))
    | st.builds(
        Grammar,
        st.sampled_from([each for each in GrammarKind if each is not GrammarKind.JSON_OBJECT]),
        st.text(st.characters(codec="utf-8")),
    ),
)


@given(params)
def test_sampling_survives_the_wire(value: SamplingParams) -> None:
    raw = convert.sampling_to_wire(value).SerializeToString()
    assert convert.sampling_from_wire(tandem_pb2.SamplingParams.FromString(raw)) == value


def test_core_gateway_and_wire_have_the_same_sampling_fields() -> None:
    wire = {field.name for field in tandem_pb2.SamplingParams.DESCRIPTOR.fields}
    wire = wire - {"structured_output"} | {"grammar"}
    assert wire == {field.name for field in fields(SamplingParams)} == {field.name for field in fields(SamplingFields)}


def test_structured_output_of_no_known_form_is_no_free_pass() -> None:
    """A newer client may send a form that this version doesn't know."""
    unknown = tandem_pb2.StructuredOutput.FromString(b"\x7a\x01x")  # field 15
    message = tandem_pb2.GenerateRequest(text="a", sampling=tandem_pb2.SamplingParams(structured_output=unknown))
    with pytest.raises(InvalidRequest, match="structured_output is empty, but must be one of json_schema, json_object"):
        request_from_wire(message)


def test_zero_and_unset_are_two_things() -> None:
    message = tandem_pb2.GenerateRequest(
        text="a", sampling=tandem_pb2.SamplingParams(max_tokens=0, temperature=0), priority=0, speculate=False
    )
    request = request_from_wire(message)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (0, 0.0)
    assert (request.priority, request.speculate, request.reuse) == (0, False, None)
    assert request_from_wire(tandem_pb2.GenerateRequest()) == RequestFields(prompt=None)


def test_the_three_forms_of_prompt() -> None:
    chat = tandem_pb2.ChatInput(messages=[tandem_pb2.ChatMessage(role="user", content="hi")])
    assert request_from_wire(tandem_pb2.GenerateRequest(text="")).prompt == TextPrompt("")
    assert request_from_wire(tandem_pb2.GenerateRequest(chat=chat)).prompt == ChatPrompt((ChatMessage("user", "hi"),))
    tokens = tandem_pb2.TokenInput(ids=[1, 2])
    assert request_from_wire(tandem_pb2.GenerateRequest(tokens=tokens)).prompt == TokenPrompt((1, 2))


def test_a_completion_says_what_the_engine_counted() -> None:
    usage = Usage(
        prompt_tokens=20, completion_tokens=9, reused_target=16, reused_draft=15, reused_joint=15, decode_steps=5,
        draft_steps=4, drafted=12, accepted=6, preemptions=0, ttft_s=0.1, total_s=0.2,
    )  # fmt: skip
    completion = convert.completion_to_wire(FinishReason.LENGTH, usage)
    assert completion.finish_reason == tandem_pb2.FINISH_REASON_LENGTH
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (20, 9)
    assert completion.reuse == tandem_pb2.Reuse(target_tokens=16, draft_tokens=15, joint_tokens=15)
    speculation = completion.speculation
    assert (speculation.steps, speculation.drafted_tokens, speculation.accepted_tokens) == (4, 12, 6)
    assert speculation.mean_acceptance_length == 2.5


def test_logprobs_keep_their_order() -> None:
    (message,) = convert.logprobs_to_wire([TokenLogprobs(5, -0.5, ((5, -0.5), (7, -2.0)))])
    assert (message.token_id, message.logprob) == (5, -0.5)
    assert [(top.token_id, top.logprob) for top in message.top] == [(5, -0.5), (7, -2.0)]
