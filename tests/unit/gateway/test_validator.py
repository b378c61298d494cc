"""The bounded validator: every limit refuses with field, value and limit, and everything inside the limits passes."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.sampling import Grammar, GrammarKind
from cluster.errors import InvalidRequest, ModelNotFound, PromptTooLarge, TandemError
from cluster.gateway.request import ChatMessage, ChatPrompt, RequestFields, SamplingFields, TextPrompt, TokenPrompt
from cluster.gateway.validator import DEFAULT_MAX_TOKENS, Validator
from cluster.routing.types import ModelCard, PoolSize

CARD = ModelCard(name="tiny", fingerprint="f", kv_dtype="float32", block_size=16, max_len=1024, vocab_size=512)
POOL = PoolSize("target", num_blocks=50, block_size=8, num_bytes=1, span=0)
VALIDATOR = Validator(CARD)

GOOD = RequestFields(TextPrompt("hello"))


def sampling(**fields: Any) -> RequestFields:
    return replace(GOOD, sampling=SamplingFields(**fields))


REGEX = Grammar(GrammarKind.REGEX, "a+")


def schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def nested(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


BAD = [
    (replace(GOOD, prompt=None), "prompt", "missing", "text, chat messages or token ids"),
    (replace(GOOD, prompt=TextPrompt("")), "prompt", "empty", "at least 1 token"),
    (replace(GOOD, prompt=TextPrompt("a" * 131_073)), "prompt", "131073 characters", "at most 131072 characters"),
    (replace(GOOD, prompt=TextPrompt("a\ud800")), "prompt", "U+D800", "UTF-8"),
    (replace(GOOD, prompt=TokenPrompt(())), "prompt", "empty", "1 to 1023 tokens"),
    (replace(GOOD, prompt=TokenPrompt((1,) * 1024)), "prompt", "1024 tokens", "1 to 1023 tokens"),
    (replace(GOOD, prompt=TokenPrompt((1, 512))), "prompt[1]", "512", "from 0 to 511"),
    (replace(GOOD, prompt=TokenPrompt((-1,))), "prompt[0]", "-1", "from 0 to 511"),
    (replace(GOOD, prompt=ChatPrompt(())), "messages", "empty", "1 to 1024 messages"),
    (replace(GOOD, prompt=ChatPrompt((ChatMessage("user", "a"),) * 1025)), "messages", "1025", "1 to 1024 messages"),
    (replace(GOOD, prompt=ChatPrompt((ChatMessage("root", "a"),))), "messages[0].role", "root", "system, user, assist"),
    (replace(GOOD, request_id="a b"), "request_id", "a b", "1 to 128"),
    (replace(GOOD, request_id="a" * 129), "request_id", "a" * 64, "1 to 128"),
    (replace(GOOD, priority=101), "priority", "101", "-100 to 100"),
    (sampling(max_tokens=0), "max_tokens", "0", "from 1 to 1023"),
    (sampling(max_tokens=2**63), "max_tokens", str(2**63), "from 1 to 1023"),
    (sampling(min_tokens=1024), "min_tokens", "1024", "from 0 to 1023"),
    (sampling(temperature=math.nan), "temperature", "nan", "0 or from 0.01 to 2"),
    (sampling(temperature=math.inf), "temperature", "inf", "0 or from 0.01 to 2"),
    (sampling(temperature=-0.5), "temperature", "-0.5", "0 or from 0.01 to 2"),
    (sampling(temperature=1e-300), "temperature", "1e-300", "0 or from 0.01 to 2"),
    (sampling(top_k=0), "top_k", "0", "from 1 to 512"),
    (sampling(top_k=513), "top_k", "513", "from 1 to 512"),
    (sampling(top_p=0.0), "top_p", "0.0", "to 1"),
    (sampling(top_p=1.1), "top_p", "1.1", "to 1"),
    (sampling(min_p=-0.1), "min_p", "-0.1", "from 0 to 1"),
    (sampling(seed=2**64), "seed", str(2**64), f"from 0 to {2**64 - 1}"),
    (sampling(presence_penalty=2.1), "presence_penalty", "2.1", "from -2 to 2"),
    (sampling(frequency_penalty=math.nan), "frequency_penalty", "nan", "from -2 to 2"),
    (sampling(repetition_penalty=0.0), "repetition_penalty", "0.0", "from 0.01 to 10"),
    (sampling(logprobs=21), "logprobs", "21", "from 0 to 20"),
    (sampling(stop=("a",) * 17), "stop", "17", "0 to 16 strings"),
    (sampling(stop=("",)), "stop[0]", "empty", "1 to 256 characters"),
    (sampling(stop=("ok", "b" * 257)), "stop[1]", "257", "1 to 256 characters"),
    (sampling(stop_token_ids=(1,) * 65), "stop_token_ids", "65", "0 to 64 token ids"),
    (sampling(stop_token_ids=(512,)), "stop_token_ids[0]", "512", "from 0 to 511"),
    (sampling(grammar=REGEX, stop=("x",)), "stop", "x", "unset with structured_output"),
    (sampling(grammar=REGEX, ignore_eos=True), "ignore_eos", "true", "unset with structured_output"),
    (sampling(grammar=REGEX, min_tokens=1), "min_tokens", "1", "unset with structured_output"),
    (sampling(grammar=replace(REGEX, text="")), "structured_output.regex", "empty", "1 to 65536 characters"),
    (sampling(grammar=replace(REGEX, text="a" * 65_537)), "structured_output.regex", "65537", "at most 65536"),
    (sampling(grammar=replace(REGEX, text="a\ud800")), "structured_output.regex", "U+D800", "UTF-8"),
    (sampling(grammar=schema('{"type":')), "structured_output.json_schema", '{"type":', "JSON (Expecting value"),
    (sampling(grammar=schema("true")), "structured_output.json_schema", "true", "a JSON object"),
    (sampling(grammar=schema(nested(65))), "structured_output.json_schema", "too deeply", "at most 64 levels"),
    (sampling(grammar=schema(nested(9000))), "structured_output.json_schema", "too deeply", "at most 64 levels"),
]


@pytest.mark.parametrize(("request_", "field", "value", "limit"), BAD, ids=[f"{row[1]}-{row[2][:12]}" for row in BAD])
def test_refuses_by_field_value_and_limit(request_: RequestFields, field: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        VALIDATOR.check(request_)
    assert caught.value.field == field
    assert value in caught.value.value
    assert limit in caught.value.limit
    assert caught.value.remedy


EDGES = [
    sampling(max_tokens=1, temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, seed=0, logprobs=0, min_tokens=1),
    sampling(max_tokens=1023, temperature=2.0, top_k=512, top_p=1e-6, min_p=1.0, seed=2**64 - 1, logprobs=20),
    sampling(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=10.0),
    sampling(grammar=schema(nested(64)), stop=(), ignore_eos=False, min_tokens=0, stop_token_ids=(3,)),
    sampling(grammar=Grammar(GrammarKind.EBNF, "a" * 65_536)),
    sampling(grammar=Grammar(GrammarKind.JSON_OBJECT)),
    sampling(stop=("s" * 256,) * 16, stop_token_ids=(0, 511)),
    replace(GOOD, prompt=TokenPrompt((0, 511)), request_id="a" * 128, priority=-100, model="tiny"),
    replace(GOOD, prompt=ChatPrompt(tuple(ChatMessage(role, "") for role in ("system", "user", "assistant")))),
]


@pytest.mark.parametrize("request_", EDGES)
def test_both_ends_of_every_limit_pass(request_: RequestFields) -> None:
    VALIDATOR.check(request_)
    VALIDATOR.admit(request_, [1])


def test_an_unknown_model_is_not_found_and_the_served_one_named() -> None:
    with pytest.raises(ModelNotFound, match=r"gpt-9.*tiny"):
        VALIDATOR.check(replace(GOOD, model="gpt-9"))


def test_max_tokens_defaults_to_what_is_left() -> None:
    assert VALIDATOR.admit(GOOD, [1] * 10).max_tokens == DEFAULT_MAX_TOKENS
    assert VALIDATOR.admit(GOOD, [1] * 1000).max_tokens == 24
    assert Validator(CARD, (POOL,)).admit(GOOD, [1] * 390).max_tokens == 11


def test_what_is_set_is_kept_and_the_rest_takes_its_default() -> None:
    params = VALIDATOR.admit(sampling(max_tokens=5, temperature=0.0, stop=("x",)), [1])
    assert (params.max_tokens, params.temperature, params.stop) == (5, 0.0, ("x",))
    assert (params.top_k, params.top_p, params.repetition_penalty) == (None, 1.0, 1.0)


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        (0, {}, "prompt is empty"),
        (1024, {}, "prompt is 1024 tokens long, but must be at most 1023 tokens"),
        (1000, {"max_tokens": 25}, "max_tokens is 25, but must be at most 24"),
        (1000, {"min_tokens": 25}, "min_tokens is 25, but must be from 0 to 24"),
    ],
)
def test_lengths_are_checked_once_tokens_are_known(prompt: int, fields: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        VALIDATOR.admit(sampling(**fields), [1] * prompt)


def test_a_prompt_larger_than_a_pool_is_refused_with_the_numbers_of_that_pool() -> None:
    validator = Validator(CARD, (POOL,))
    validator.admit(sampling(max_tokens=10), [1] * 391)
    with pytest.raises(PromptTooLarge) as caught:
        validator.admit(sampling(max_tokens=10), [1] * 392)
    assert (caught.value.needed_blocks, caught.value.available_blocks, caught.value.largest_prompt) == (51, 50, 391)
    assert "51 blocks of the target KV pool" in str(caught.value)
    validator.admit(GOOD, [1] * 400)
    with pytest.raises(PromptTooLarge):
        validator.admit(GOOD, [1] * 401)


numbers = st.none() | st.integers(-(2**70), 2**70) | st.floats()


@given(
    st.builds(
        RequestFields,
        prompt=st.none()
        | st.builds(TextPrompt, st.text(st.characters(), max_size=20))
        | st.builds(TokenPrompt, st.lists(st.integers(-1, 600), max_size=5).map(tuple)),
        sampling=st.builds(
            SamplingFields,
            max_tokens=st.none() | st.integers(-1, 2**64),
            temperature=numbers,
            top_k=st.none() | st.integers(-1, 1000),
            top_p=numbers,
            min_p=numbers,
            seed=st.none() | st.integers(-1, 2**65),
            stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
            stop_token_ids=st.lists(st.integers(-1, 600), max_size=3).map(tuple),
            min_tokens=st.none() | st.integers(-1, 2000),
            presence_penalty=numbers,
            frequency_penalty=numbers,
            repetition_penalty=numbers,
            logprobs=st.none() | st.integers(-1, 30),
            grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(max_size=9)),
        ),
        model=st.sampled_from(["", "tiny", "other"]),
        request_id=st.text(max_size=5),
        priority=st.none() | st.integers(-200, 200),
    )
)
def test_any_input_is_either_refused_by_a_sentence_or_bounded_in_every_field(request_: RequestFields) -> None:
    try:
        VALIDATOR.check(request_)
        params = VALIDATOR.admit(request_, [1, 2, 3])
    except TandemError as error:
        assert str(error).endswith(".")
        assert len(str(error)) < 400
        return
    assert 1 <= params.max_tokens <= 1021
    assert params.temperature == 0 or 0.01 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert 0 < params.repetition_penalty <= 10
    assert params.min_tokens <= params.max_tokens
