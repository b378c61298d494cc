"""Key streams, scopes and block keys: what determines them, and that nothing else does."""

from hashlib import sha256
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.keys import KeyStream, ReuseScope, TokenBuffer, raw_block_keys
from tests.unit.core.oracle import make_pair, serve

SCOPE = ReuseScope(model="m", pool="target", span=0, kv_dtype="float32", block_size=4)
tokens = st.lists(st.integers(0, 3), max_size=30)


def stream(span: int, text: list[int] | range, block_size: int = 4) -> KeyStream:
    return KeyStream(ReuseScope("m", "draft", span, "float32", block_size), text)


def test_the_leading_window_collapses_into_one_digest() -> None:
    words = [pack("<I", token) for token in range(10, 18)]
    assert stream(2, range(10, 18)).units() == [sha256(b"".join(words[:3])).digest(), *words[3:]]
    assert stream(0, range(10, 18)).units() == words
    assert stream(2, [1, 2]).units() == []


@given(tokens, tokens, st.integers(0, 4))
def test_units_are_equal_exactly_as_far_as_the_tokens_they_stand_for(a: list[int], b: list[int], span: int) -> None:
    first, second = stream(span, a).units(), stream(span, b).units()
    for index in range(min(len(first), len(second))):
        assert (first[: index + 1] == second[: index + 1]) == (a[: index + span + 1] == b[: index + span + 1])


@given(tokens, tokens, st.integers(0, 4), st.integers(1, 5))
def test_block_keys_are_equal_exactly_as_far_as_the_tokens_they_stand_for(
    a: list[int], b: list[int], span: int, size: int
) -> None:
    first, second = (stream(span, text, size) for text in (a, b))
    for index in range(min(first.n_units, second.n_units) // size):
        end = (index + 1) * size + span
        assert (first.block_key(index) == second.block_key(index)) == (a[:end] == b[:end])


def test_a_key_is_the_digest_of_its_parent_and_its_tagged_units() -> None:
    parent = SCOPE.root()
    for index, key in enumerate(raw_block_keys(SCOPE, range(8))):
        units = pack("<4I", *range(4 * index, 4 * index + 4))
        assert key == (parent := sha256(parent + b"U" + pack("<I", 4) + units).digest())


@given(tokens, st.lists(tokens, max_size=4), st.integers(0, 4))
def test_growing_a_stream_gives_the_keys_of_the_whole(prompt: list[int], turns: list[list[int]], span: int) -> None:
    grown = stream(span, prompt)
    for turn in turns:
        grown.block_keys(0, grown.n_units // 4)
        grown.extend(turn)
    whole = stream(span, sum(turns, prompt))
    assert grown.units() == whole.units()
    assert grown.block_keys(0, grown.n_units // 4) == whole.block_keys(0, whole.n_units // 4)


def test_only_what_is_new_is_hashed_when_a_prompt_grows() -> None:
    class Counting(KeyStream):
        hashed = 0

        def _hash_up_to(self, end: int) -> None:
            Counting.hashed += end - len(self._keys)
            super()._hash_up_to(end)

    text = Counting(SCOPE, range(400))
    text.block_keys(0, 100)
    text.extend(range(40))
    text.block_keys(0, 110)
    assert Counting.hashed == 110


scopes = st.builds(
    ReuseScope,
    model=st.sampled_from(("", "a", "ab", "a\0b")),
    pool=st.sampled_from(("", "b", "target")),
    span=st.integers(0, 2),
    kv_dtype=st.sampled_from(("", "b", "bfloat16")),
    block_size=st.sampled_from((1, 11, 16)),
    lora=st.sampled_from((None, "", "b")),
    tenant_salt=st.sampled_from((b"", b"a", b"\0")),
    contents=st.sampled_from(((), ((0, b""),), ((0, b"a"),), ((1, b"a"),), ((0, b"a"), (1, b"a")))),
)


@given(scopes, scopes)
def test_different_scopes_never_share_a_root(a: ReuseScope, b: ReuseScope) -> None:
    assert (a.root() == b.root()) == (a == b)


@given(scopes, scopes, st.lists(st.integers(0, 1), min_size=36, max_size=36))
def test_different_scopes_never_share_a_key(a: ReuseScope, b: ReuseScope, text: list[int]) -> None:
    keys = [set(KeyStream(scope, text).block_keys(0, (36 - scope.span) // scope.block_size)) for scope in (a, b)]
    assert bool(keys[0] & keys[1]) == (a == b)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sampled_from((b"", b"tenant")))
def test_claim_report_and_router_name_blocks_alike(prompt: list[int], salt: bytes) -> None:
    oracle = make_pair()
    serve(oracle, prompt, tenant_salt=salt)
    routed = raw_block_keys(oracle.cache.scope("target", tenant_salt=salt), [*prompt, 0])
    reported = oracle.cache.snapshot().stored
    assert [state.key for state in reported if state.target] == routed[: len(prompt) // 4]
    claimed = oracle.cache.open("again", [*prompt, 0], tenant_salt=salt)
    full = oracle.cache.probe(claimed).target // 4
    assert full == sum(state.target for state in reported if state.key in routed)


def test_tokens_that_cannot_be_packed_are_refused_and_nothing_is_added() -> None:
    buffer = TokenBuffer([1, 2])
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="between 0 and 4294967295"):
            buffer.extend([3, bad])
    assert (buffer.n_tokens, buffer.tokens()) == (2, [1, 2])


def test_keys_of_blocks_that_are_not_full_are_an_error() -> None:
    with pytest.raises(IndexError, match="2 full blocks"):
        KeyStream(SCOPE, range(11)).block_key(2)
    with pytest.raises(ValueError, match="span is 1"):
        raw_block_keys(ReuseScope("m", "draft", 1, "float32", 4), range(9))
