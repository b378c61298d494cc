"""Compiling grammars: what is refused and in which words, what is compiled once, and what can't hurt the worker."""

import json
import time
from collections.abc import Iterator, Set

import pytest

from cluster.core.sampling import Grammar, GrammarKind
from cluster.engine.grammar import CACHED_GRAMMARS, MAX_WAITING, GrammarCompiler
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import CapacityExceeded, InvalidRequest, Unavailable
from tests.fixtures.prompts import TINY_TARGET

END = 1


def matcher_of(compiler: GrammarCompiler, grammar: Grammar, stop_ids: Set[int] = frozenset()) -> GrammarMatcher:
    return compiler.matcher(compiler.prepare(grammar).result(), stop_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_TARGET)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (END,))
    yield compiler
    compiler.close()


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the whole of `text` may be the output."""
    matcher = matcher_of(compiler, grammar)
    for token in tokenizer.backend.encode(text, add_special_tokens=False).ids:
        if not matcher.allowed()[token]:
            return False
        matcher.accept(token)
    return bool(matcher.allowed()[END])


WRONG = [
    (regex("a(b"), "regex", "unclosed group"),
    (regex("(?=a)b"), "regex", "look-around"),
    (regex("(a)\\1"), "regex", "backreferences are not supported"),
    (regex("a&&b[^\\x00-\\U0010FFFF]"), "regex", "NoExtension"),
    (schema({"type": "objec"}), "json_schema", "Invalid type: objec"),
    (schema({"uniqueItems": True}), "json_schema", "uniqueItems"),
    (schema({"$ref": "http://somewhere/else"}), "json_schema", "not present"),
    (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "json_schema", "object"),
    (Grammar(GrammarKind.EBNF, 'start: "a" b'), "ebnf", 'unknown name: "b"'),
    (Grammar(GrammarKind.EBNF, 'root ::= "a"'), "ebnf", "Expected token"),
]


@pytest.mark.parametrize(("grammar", "field", "words"), WRONG)
def test_what_cannot_be_enforced_is_refused_in_one_sentence(
    compiler: GrammarCompiler, grammar: Grammar, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        matcher_of(compiler, grammar)
    assert caught.value.field == f"structured_output.{field}"
    assert words in caught.value.message
    assert "\n" not in caught.value.message and len(caught.value.message) < 500


CHAIN = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)}
HARMFUL = {
    "runs for minutes": schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20, 40)]}
    ),
    "overflows the stack": schema({"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d1500": {}}}),
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_grammar_that_would_take_the_worker_down_is_refused_and_the_next_one_is_not(
    compiler: GrammarCompiler, kind: str
) -> None:
    with pytest.raises(InvalidRequest, match="takes too much time or memory"):
        matcher_of(compiler, HARMFUL[kind])
    assert matcher_of(compiler, regex("[ab]+")).allowed().any()
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="takes too much time or memory"):
        matcher_of(compiler, HARMFUL[kind])
    assert compiler.prepare(HARMFUL[kind]).done(), "it is known now, and not tried again"
    assert time.process_time() - began < 0.1


def test_a_grammar_is_compiled_once_while_it_is_in_use(compiler: GrammarCompiler) -> None:
    first, oldest = (compiler.prepare(regex(text)).result() for text in ("a+", "b0"))
    for i in range(CACHED_GRAMMARS - 1):
        compiler.prepare(regex(f"b{i}")).result()
        assert compiler.prepare(regex("a+")).result() is first
    compiler.prepare(regex("one too many")).result()
    assert compiler.prepare(regex("a+")).result() is first
    assert compiler.prepare(regex("b0")).result() is not oldest, "the one that was used longest ago made room"


def test_those_who_ask_for_one_grammar_wait_for_one_compilation_and_a_queue_has_an_end(
    compiler: GrammarCompiler,
) -> None:
    """The first one also starts the process of trials, which takes longer than asking for the others."""
    futures = [compiler.prepare(regex(f"c{i}")) for i in range(MAX_WAITING)]
    assert compiler.prepare(regex("c0")) is futures[0]
    with pytest.raises(CapacityExceeded, match=f"{MAX_WAITING} forms to compile"):
        compiler.prepare(regex("one more"))
    for future in futures:
        assert compiler.matcher(future.result()).allowed().any()
    assert matcher_of(compiler, regex("one more")).allowed().any()


def test_after_the_end_nothing_is_compiled(compiler: GrammarCompiler) -> None:
    compiler.close()
    with pytest.raises(Unavailable):
        compiler.prepare(regex("a"))


def test_requests_with_one_grammar_have_states_of_their_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b = matcher_of(compiler, regex("ab")), matcher_of(compiler, regex("ab"))
    before = b.allowed().copy()
    a.accept(tokenizer.backend.encode("a", add_special_tokens=False).ids[-1])
    assert (a.allowed() != before).any()
    assert (b.allowed() == before).all()


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":  1, "b": []}', False),
        ('{ "a": 1, "b": []}', False),
        ('{"b": [], "a": 1}', False),
        ('{"a": 1}', False),
        (' {"a": 1, "b": []}', False),
    ],
)
def test_json_is_written_on_one_line(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, fits: bool) -> None:
    ints = {"type": "integer"}
    form = schema(
        {"type": "object", "properties": {"a": ints, "b": {"items": ints, "type": "array"}}, "required": ["a", "b"]}
    )
    assert accepts(compiler, tokenizer, form, text) is fits


def test_a_model_without_tokenizer_or_end_token_is_named(tokenizer: Tokenizer) -> None:
    for given, ends, words in [(None, (END,), "without a tokenizer"), (tokenizer, (), "without an end token")]:
        compiler = GrammarCompiler(given, 2048, ends)
        with pytest.raises(InvalidRequest, match=words):
            matcher_of(compiler, regex("a"))
        compiler.close()
