"""What may follow is a function of the grammar and the tokens before, whatever was tried and dropped in between."""

import json
import random
from collections.abc import Iterator, Set

import numpy as np
import pytest

from cluster.core.drafts import Drafts
from cluster.core.sampling import Grammar, GrammarKind
from cluster.engine.grammar import GrammarCompiler
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.tokenizer import Tokenizer
from tests.fixtures.prompts import TINY_TARGET

END, STOP = 1, 7
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "regex": Grammar(GrammarKind.REGEX, "([0-9]{1,3},? ?)+x?"),
    "ebnf": Grammar(GrammarKind.EBNF, 'start: item ("," item)*\nitem: /[a-z]{1,5}/ | "(" start ")"'),
}


def matcher_of(compiler: GrammarCompiler, grammar: Grammar, stop_ids: Set[int] = frozenset()) -> GrammarMatcher:
    return compiler.matcher(compiler.prepare(grammar).result(), stop_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_TARGET)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (END,))
    yield compiler
    compiler.close()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", GRAMMARS)
def test_drafts_that_were_tried_leave_no_trace(compiler: GrammarCompiler, name: str) -> None:
    for seed in range(6):
        rnd = random.Random(seed)
        output: list[int] = []
        matcher = matcher_of(compiler, GRAMMARS[name])
        for _ in range(25):
            drafts: list[int] = []
            for _ in range(rnd.randint(0, 3)):
                following = np.flatnonzero(matcher.allowed(drafts))
                drafts.append(
                    int(rnd.choice(following)) if len(following) and rnd.random() < 0.9 else rnd.randrange(2048)
                )
            fresh = matcher_of(compiler, GRAMMARS[name])
            for token in output:
                fresh.accept(token)
            assert (matcher.allowed() == fresh.allowed()).all(), output
            for token in drafts:
                fresh.accept(token)
            assert (matcher.allowed(drafts) == fresh.allowed()).all(), (output, drafts)
            following = np.flatnonzero(matcher.allowed())
            choices = following[following != END]
            if not len(choices):
                break
            output.append(int(rnd.choice(choices)))
            matcher.accept(output[-1])


def test_of_a_tree_the_branches_that_fit_are_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(compiler, Grammar(GrammarKind.REGEX, "(1x|2y)z"))
    one, two, x, y, z = (ids(tokenizer, letter)[-1] for letter in "12xyz")
    tree = Drafts((one, two, y, y, x, z, z), (None, None, 0, 1, 0, 2, 3))
    assert matcher.fitting(tree) == Drafts((one, two, y, x, z), (None, None, 1, 0, 2))
    assert matcher.fitting(Drafts.chain([x, one])) == Drafts()
    assert (
        matcher.fitting(Drafts.chain([one, -1])) == matcher.fitting(Drafts.chain([one, 10**6])) == Drafts.chain([one])
    )


def test_nothing_is_drafted_beyond_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    (a,) = ids(tokenizer, "a")[-1:]
    matcher = matcher_of(compiler, Grammar(GrammarKind.REGEX, "a{1,3}"))
    assert matcher.fitting(Drafts.chain([a, END, a])) == Drafts.chain([a])
    assert not matcher.allowed([a, END]).any()
    matcher.accept(a)
    matcher.accept(END)
    assert matcher.stuck


def test_end_and_stop_tokens_are_allowed_where_the_output_is_complete(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Even a stop token whose text the form has in its middle."""
    a, stop = (ids(tokenizer, letter)[-1] for letter in "ab")
    matcher = matcher_of(compiler, Grammar(GrammarKind.REGEX, "a[ab]a?"), {stop, 5000})
    matcher.accept(a)
    assert not matcher.allowed()[[END, stop]].any()
    matcher.accept(a)
    assert matcher.allowed()[[END, stop, a]].all()


def test_padding_of_the_vocabulary_is_never_allowed(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 300, (END,))
    matcher = matcher_of(compiler, Grammar(GrammarKind.REGEX, ".*"))
    assert matcher.allowed().shape == (300,)
    assert matcher.allowed().sum() > 50
    compiler.close()
