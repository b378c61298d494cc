"""Stop conditions: the same text, ids and finish reason with speculation as without, whatever is accepted at once."""

from functools import cache

import pytest

from cluster.core.request import FinishReason
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from tests.fixtures.prompts import TINY_TARGET
from tests.integration.engine.support import eight_prompts, encode, greedy, make_engine, reference, requests, tokenizer

METHODS = ["none", "ngram", "draft_model", "eagle3", "oracle"]


@cache
def engine_for(method: str) -> Engine:
    """ "oracle" drafts with the target itself: every draft is accepted, so each stop falls inside an accepted run."""
    return make_engine("draft_model", draft=TINY_TARGET) if method == "oracle" else make_engine(method)


def ask(method: str, prompt: tuple[int, ...], **options: object) -> RequestEvent:
    (event,) = engine_for(method).generate(requests([prompt], greedy(**{"max_tokens": 24, **options})))  # type: ignore[arg-type]
    return event


def plain_text(prompt: tuple[int, ...], count: int = 24) -> str:
    return tokenizer().decode(reference(prompt, count).tokens[:count], skip_special_tokens=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", range(1, 12, 2))
def test_stop_string_anywhere_in_the_answer(method: str, at: int) -> None:
    """A stop string of three characters that first occurs around position `at` of the text."""
    for prompt in eight_prompts()[::3]:
        text = plain_text(prompt)
        stop = text[at : at + 3]
        event = ask(method, prompt, stop=(stop,), ignore_eos=True)
        assert event.text == text[: text.index(stop)]
        assert event.finish is FinishReason.STOP
        # The ids are those up to the token that completed the stop string, and no more.
        ids = reference(prompt, 24).tokens
        assert event.token_ids == ids[: len(event.token_ids)]
        assert stop in tokenizer().decode(event.token_ids, skip_special_tokens=True)
        assert stop not in tokenizer().decode(event.token_ids[:-1], skip_special_tokens=True)
        assert event.usage is not None
        assert event.usage.completion_tokens == len(event.token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_stop_string_over_several_tokens_is_held_back_until_it_fails(method: str) -> None:
    prompt = eight_prompts()[0]
    text = plain_text(prompt)
    impossible = text[2:9] + "\u2603"
    event = ask(method, prompt, stop=(impossible,), ignore_eos=True)
    assert event.text == text
    assert event.finish is FinishReason.LENGTH


@pytest.mark.parametrize("method", METHODS)
def test_stop_token_ends_the_request_and_has_no_text(method: str) -> None:
    prompt = eight_prompts()[1]
    ids = reference(prompt, 24).tokens
    for at in (0, 1, 2, 5, 6):
        first = ids.index(ids[at])
        event = ask(method, prompt, stop_token_ids=(ids[at],), ignore_eos=True)
        assert event.token_ids == ids[: first + 1]
        assert event.text == tokenizer().decode(ids[:first], skip_special_tokens=True)
        assert event.finish is FinishReason.STOP


@pytest.mark.parametrize("method", METHODS)
def test_end_of_sequence(method: str) -> None:
    eos = engine_for(method).parts.target.eos_ids
    for prompt in eight_prompts():
        ids = reference(prompt, 24).tokens
        end = next((i for i, token in enumerate(ids) if token in eos), None)
        event = ask(method, prompt)
        assert event.token_ids == (ids if end is None else ids[: end + 1])
        assert event.finish is (FinishReason.LENGTH if end is None else FinishReason.STOP)


@pytest.mark.parametrize("method", METHODS)
def test_min_tokens_comes_before_every_stop(method: str) -> None:
    prompt = eight_prompts()[0]
    free = ask(method, prompt, ignore_eos=True)
    event = ask(method, prompt, stop=(free.text[0],), min_tokens=7, ignore_eos=True)
    assert len(event.token_ids) >= 7
    assert event.token_ids == ask("none", prompt, stop=(free.text[0],), min_tokens=7, ignore_eos=True).token_ids
    assert len(ask(method, prompt, min_tokens=20).token_ids) >= 20


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_max_tokens_is_never_exceeded(method: str, max_tokens: int) -> None:
    for prompt in eight_prompts()[::4]:
        event = ask(method, prompt, max_tokens=max_tokens, ignore_eos=True)
        assert event.token_ids == reference(prompt, 24).tokens[:max_tokens]
        assert event.finish is FinishReason.LENGTH
        assert event.text == plain_text(prompt)[: len(event.text)]


@pytest.mark.parametrize("method", METHODS)
def test_max_len_ends_an_answer(method: str) -> None:
    prompt = encode("Hello there, how are you?")
    engine = make_engine(method if method != "oracle" else "ngram", max_len=len(prompt) + 5)
    (event,) = engine.generate(requests([prompt], greedy(100, ignore_eos=True)))
    assert len(event.token_ids) == 5
    assert event.finish is FinishReason.LENGTH


def test_drafts_beyond_the_end_are_not_counted_as_accepted() -> None:
    prompt = eight_prompts()[0]
    ids = reference(prompt, 24).tokens
    event = ask("oracle", prompt, stop_token_ids=(ids[2],), ignore_eos=True)
    assert event.usage is not None
    assert event.usage.accepted <= event.usage.completion_tokens - 1


def test_logprobs_come_one_per_token_and_agree_with_and_without_speculation() -> None:
    prompt = eight_prompts()[2]
    plain = ask("none", prompt, logprobs=3, ignore_eos=True)
    drafted = ask("oracle", prompt, logprobs=3, ignore_eos=True)
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    assert [entry.token_id for entry in drafted.logprobs] == list(drafted.token_ids) == list(plain.token_ids)
    for ours, theirs in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top[0] == pytest.approx((ours.token_id, ours.logprob), abs=1e-4)
        assert len(ours.top) == 3


def test_no_logprobs_unless_asked_for() -> None:
    assert ask("none", eight_prompts()[0]).logprobs is None


def test_streamed_pieces_join_to_the_whole() -> None:
    """What arrives step by step is what a stop inside it leaves: no piece shows a part of the stop string."""
    engine, prompt = engine_for("oracle"), eight_prompts()[0]
    text = plain_text(prompt)
    stop = text[6:10]
    engine.add(EngineRequest("streamed", prompt, greedy(24, stop=(stop,), ignore_eos=True)))
    shown = ""
    while engine.has_work():
        for event in engine.step():
            shown += event.text
            assert text.startswith(shown)
            assert len(shown) <= text.index(stop)
    assert shown == text[: text.index(stop)]
