"""Output under a grammar: it always fits, and speculation, reuse, batching and preemption change none of its tokens."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from cluster.core.request import FinishReason
from cluster.core.sampling import Grammar, GrammarKind, SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.errors import InvalidRequest
from cluster.speculation.tree import TreeShape
from tests.integration.engine.support import METHODS, eight_prompts, greedy, make_engine

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {"person": PERSON, "tree": TREE}
LIST = 'start: item (", " item){1,4}\nitem: /[a-z]{2,6}/ | "(" start ")"'
GRAMMARS = {
    "person": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "tree": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(TREE)),
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "date": Grammar(GrammarKind.REGEX, r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9](, and so on)?"),
    "list": Grammar(GrammarKind.EBNF, LIST),
}
GREEDY = greedy(40)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, top_k=200, min_p=0.001, seed=7)
PENALTIES = SamplingParams(max_tokens=40, temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.4)
MIXED: list[tuple[str | None, SamplingParams]] = [
    ("person", GREEDY), ("tree", GREEDY), (None, GREEDY), ("object", GREEDY), ("date", GREEDY), ("list", GREEDY),
    ("person", SEEDED), (None, SEEDED), ("list", SEEDED), ("person", PENALTIES),
]  # fmt: skip
BYTES_PER_TOKEN = 2560  # in both pools, with the draft model


def mixed_requests(name: str = "r", count: int = len(MIXED)) -> list[EngineRequest]:
    """Grammars of each kind, chosen greedily and by seed, and requests without one between them."""
    prompts = eight_prompts()
    return [
        EngineRequest(f"{name}{i}", prompts[i % 8], replace(sampling, grammar=GRAMMARS[kind] if kind else None))
        for i, (kind, sampling) in enumerate(MIXED[:count])
    ]


def tokens(events: list[RequestEvent]) -> list[tuple[int, ...]]:
    return [event.token_ids for event in events]


@pytest.fixture(scope="module")
def plain() -> list[RequestEvent]:
    """Each request alone, decoded one token at a time, with no KV of others."""
    engine = make_engine("none", reuse=False)
    events = [event for request in mixed_requests() for event in engine.generate([request])]
    engine.close()
    return events


def check(text: str, kind: str) -> None:
    """Raises unless `text` is complete and of its form, as judged by other code than that which enforced it."""
    match kind:
        case "person" | "tree":
            jsonschema.validate(json.loads(text), SCHEMAS[kind])
        case "object":
            assert isinstance(json.loads(text), dict)
        case "date":
            assert text[4::3][:2] == "--" and len(text) in (10, 21), text
        case "list":
            assert text.count("(") == text.count(")") and set(text) <= set("abcdefghijklmnopqrstuvwxyz(), "), text


@pytest.mark.parametrize("kind", GRAMMARS)
def test_what_ends_by_stop_fits(kind: str) -> None:
    engine = make_engine("eagle3")
    requests = [
        EngineRequest(f"r{seed}", eight_prompts()[seed], SamplingParams(80, seed=seed, grammar=GRAMMARS[kind]))
        for seed in range(8)
    ]
    complete = [event.text for event in engine.generate(requests) if event.finish is FinishReason.STOP]
    engine.close()
    for text in complete:
        check(text, kind)
    assert complete


@pytest.mark.parametrize("method", METHODS)
def test_speculation_reuse_and_batching_change_no_token(method: str, plain: list[RequestEvent]) -> None:
    engine = make_engine(method, chunk=16)
    assert tokens(engine.generate(mixed_requests())) == tokens(plain)
    assert tokens(engine.generate(mixed_requests("warm", 4))) == tokens(plain)[:4]
    stats = engine.stats()
    engine.close()
    assert (stats.failed_steps, stats.preemptions) == (0, 0)
    assert (stats.accepted > 0) == (method != "none")


def test_trees_of_drafts_change_no_token(plain: list[RequestEvent]) -> None:
    engine = make_engine("eagle3", tree=TreeShape(top_k=3, total=8))
    assert tokens(engine.generate(mixed_requests())) == tokens(plain)
    accepted = engine.stats().accepted
    engine.close()
    assert accepted > 0


def test_preempted_requests_go_on_in_their_form(plain: list[RequestEvent]) -> None:
    engine = make_engine("draft_model", block_size=4, kv_bytes=60 * 4 * BYTES_PER_TOKEN)
    assert tokens(engine.generate(mixed_requests())) == tokens(plain)
    stats = engine.stats()
    engine.close()
    assert stats.preemptions > 0
    assert stats.failed_steps == 0


def test_drafts_outside_the_grammar_are_not_verified() -> None:
    """The one text that fits repeats the prompt's words otherwise than the prompt does."""
    prompt = eight_prompts()[0]
    engine = make_engine("ngram", reuse=False)
    (free,) = engine.generate([EngineRequest("free", prompt, greedy(24, ignore_eos=True))])
    assert free.usage is not None and free.usage.drafted > 0
    only = Grammar(GrammarKind.REGEX, "xyzzy plugh " * 4)
    (event,) = engine.generate([EngineRequest("bound", prompt, greedy(48, grammar=only))])
    engine.close()
    assert (event.text, event.finish) == ("xyzzy plugh " * 4, FinishReason.STOP)
    assert event.usage is not None
    assert event.usage.accepted == event.usage.drafted > 0, "prompt lookup drafts the repetition, and nothing else fits"


def test_max_tokens_may_cut_the_form_short() -> None:
    engine = make_engine("draft_model")
    grammar = GRAMMARS["person"]
    (whole,) = engine.generate([EngineRequest("whole", eight_prompts()[0], greedy(64, grammar=grammar))])
    (cut,) = engine.generate([EngineRequest("cut", eight_prompts()[0], greedy(7, grammar=grammar))])
    engine.close()
    assert (whole.finish, cut.finish) == (FinishReason.STOP, FinishReason.LENGTH)
    assert cut.token_ids == whole.token_ids[:7]
    assert whole.text.startswith(cut.text) and cut.text


def test_stop_tokens_of_the_request_wait_for_the_end() -> None:
    """The quotation mark is an ordinary part of JSON; as a stop token it may come after the JSON only."""
    engine = make_engine("eagle3")
    prompt, grammar = eight_prompts()[1], Grammar(GrammarKind.REGEX, '(ab|cd){3}"?')
    quote = engine.parts.tokenizer.encode('"')[-1] if engine.parts.tokenizer else 0
    params = greedy(20, grammar=grammar, stop_token_ids=(quote,))
    (event,) = engine.generate([EngineRequest("r", prompt, params)])
    engine.close()
    assert event.finish is FinishReason.STOP
    assert len(event.text) == 6 and set(event.text) <= set("abcd")


def test_logprobs_are_the_model_s_own() -> None:
    """The grammar leaves one choice, which the model thinks unlikely."""
    engine = make_engine("none")
    params = greedy(4, grammar=Grammar(GrammarKind.REGEX, "qqqqqqqq"), logprobs=1)
    (event,) = engine.generate([EngineRequest("r", eight_prompts()[0], params)])
    engine.close()
    assert event.logprobs is not None
    first = event.logprobs[0]
    assert first.logprob < first.top[0][1] < 0
    assert first.token_id != first.top[0][0]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(GrammarKind.REGEX, "a(b"), "unclosed group"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "objec"}'), "Invalid type: objec"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "not"),
        (Grammar(GrammarKind.EBNF, 'start: "a" b'), "unknown name"),
    ],
)
def test_a_grammar_that_means_nothing_is_refused(grammar: Grammar, words: str) -> None:
    engine = make_engine("none")
    with pytest.raises(InvalidRequest, match=words):
        engine.add(EngineRequest("r", (5, 6), greedy(4, grammar=grammar)))
    assert not engine.has_work()
    engine.close()


def test_a_form_that_becomes_too_intricate_ends_its_request_alone() -> None:
    engine = make_engine("none")
    layers = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40))
    grammar = Grammar(GrammarKind.EBNF, f'start: a0\n{layers}\na40: "y"')
    bound = EngineRequest("bound", eight_prompts()[0], greedy(4, grammar=grammar))
    other = EngineRequest("other", eight_prompts()[1], greedy(4, ignore_eos=True))
    events = engine.generate([bound, other])
    alone = _alone(engine, replace(other, request_id="alone"))
    engine.close()
    assert events[0].finish is FinishReason.ERROR
    assert isinstance(events[0].error, InvalidRequest)
    assert events[1].token_ids == alone.token_ids


def _alone(engine: Engine, request: EngineRequest) -> RequestEvent:
    (event,) = engine.generate([request])
    return event
