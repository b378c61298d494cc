"""Suffix decoding proposes what most often followed the last tokens, in the request's own text and in past outputs."""

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.sampling import SamplingParams
from cluster.speculation.protocol import DraftTask
from cluster.speculation.suffix import SuffixDrafter
from cluster.speculation.suffix_memory import PastOutputs
from cluster.speculation.suffix_search import SuffixRule, TokenStream

FEW = st.lists(st.integers(0, 2), max_size=30)
PARAMS = SamplingParams(max_tokens=8)
RULE = SuffixRule(depth=24, factor=1.0, least_probability=0.1)


def drafter(k: int = 4, rule: SuffixRule = RULE, cached: int = 100) -> SuffixDrafter:
    return SuffixDrafter(k, rule, cached)


def task(
    tokens: Sequence[int], k: int = 4, request_id: str = "r", prompt: int | None = None, tenant: bytes | None = b""
) -> DraftTask:
    num_prompt = len(tokens) if prompt is None else prompt
    return DraftTask(request_id, tokens, 0, 0, k, PARAMS, 0, num_prompt, tenant=tenant)


def ended(
    drafting: SuffixDrafter, tokens: list[int], request_id: str, prompt: int = 1, tenant: bytes | None = b""
) -> None:
    """A request that is drafted for once, and whose last tokens come with the step that ends it."""
    known = tokens[: prompt + 1]
    drafting.propose([task(known, request_id=request_id, prompt=prompt, tenant=tenant)])
    known += tokens[prompt + 1 :]
    drafting.forget(request_id)


def stream_of(*texts: Sequence[int]) -> TokenStream:
    stream = TokenStream()
    for text in texts:
        stream.extend(text)
        stream.close()
    return stream


def scores_of_a_tree(
    texts: Sequence[Sequence[int]], context: Sequence[int], k: int, rule: SuffixRule
) -> tuple[float, float]:
    """The lowest and the highest best score by the definition, depending on which of equally frequent tokens win.

    From a tree of all substrings with their counts, the context itself counted in.
    """
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                counts[tuple(text[start:end])] += 1

    def follow(path: tuple[int, ...], seen: int, probability: float, limit: int) -> tuple[float, float]:
        most = max(counts[(*path, token)] for token in range(3))
        probability *= most / seen
        if not limit or not most or probability < rule.least_probability:
            return 0.0, 0.0
        ways = [
            follow((*path, token), most, probability, limit - 1) for token in range(3) if counts[(*path, token)] == most
        ]
        return probability + min(low for low, _ in ways), probability + max(high for _, high in ways)

    paths = [tuple(context[-length:]) for length in range(1, min(rule.depth - 1, len(context)) + 1)]
    ranges = [follow(path, counts[path] + 1, 1.0, min(k, int(len(path) * rule.factor))) for path in paths]
    return max((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=0.0)


@given(st.lists(FEW, min_size=1, max_size=3), FEW, st.integers(1, 5), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_score_is_that_of_a_suffix_tree(texts: list[list[int]], context: list[int], k: int, factor: float) -> None:
    rule = SuffixRule(6, factor, 0.1)
    guess = rule.guess(stream_of(*texts).tokens, context, k)
    lowest, highest = scores_of_a_tree(texts, context, k, rule)
    assert len(guess.tokens) <= k
    assert lowest - 1e-9 <= guess.score <= highest + 1e-9


@given(FEW, st.integers(1, 4))
def test_a_text_is_not_matched_with_its_own_end(tokens: list[int], k: int) -> None:
    """Every draft followed its match somewhere in the text before."""
    stream = TokenStream()
    stream.extend(tokens)
    guess = RULE.guess(stream.tokens, tokens, k)
    if guess.tokens:
        said = [tokens[-1], *guess.tokens]
        assert any(tokens[i : i + len(said)] == said for i in range(len(tokens) - 1))


def test_the_most_frequent_continuation_wins_and_then_the_latest() -> None:
    often = stream_of([1, 2, 5], [1, 2, 6], [1, 2, 5])
    assert RULE.guess(often.tokens, [1, 2], 1).tokens == (5,)
    even = stream_of([1, 2, 5], [1, 2, 6])
    assert RULE.guess(even.tokens, [1, 2], 1).tokens == (6,)


def test_a_longer_match_allows_a_longer_draft() -> None:
    past = stream_of([1, 2, 3, 4, 5, 6, 7, 8]).tokens
    assert RULE.guess(past, [9, 3], 4).tokens == (4,)
    assert RULE.guess(past, [2, 3], 4).tokens == (4, 5)
    assert RULE.guess(past, [1, 2, 3], 4).tokens == (4, 5, 6)
    assert SuffixRule(24, 2.0, 0.1).guess(past, [2, 3], 4).tokens == (4, 5, 6, 7)
    assert SuffixRule(2, 2.0, 0.1).guess(past, [1, 2, 3], 4).tokens == (4, 5)


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    """After 1, 2 came 3 twice; after that, each of three tokens once."""
    past = stream_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]).tokens
    assert SuffixRule(24, 2.0, 0.5).guess(past, [1, 2], 4).tokens == (3,)
    assert SuffixRule(24, 2.0, 0.2).guess(past, [1, 2], 4).tokens == (3, 6)


def test_past_outputs_are_drafted_from_to_their_very_last_token() -> None:
    drafting = drafter()
    ended(drafting, [1, 5, 6, 7, 8, 9], "old")
    assert drafting.propose([task([3, 5, 6])]) == [Drafts.chain((7, 8))]
    assert drafting.propose([task([3, 5, 6, 7, 8])]) == [Drafts.chain((9,))]


def test_a_prompt_asked_again_is_recognised_by_its_end() -> None:
    drafting = drafter()
    ended(drafting, [1, 2, 3, 5, 6, 7, 8, 9], "old", prompt=3)
    assert drafting.propose([task([1, 2, 3, 5], prompt=3)]) == [Drafts.chain((6, 7, 8, 9))]


def test_tenants_do_not_learn_from_each_other() -> None:
    drafting = drafter()
    ended(drafting, [1, 5, 6, 7, 8], "old", tenant=b"red")
    assert drafting.propose([task([3, 5, 6], request_id="a", tenant=b"blue")]) == [NO_DRAFTS]
    assert drafting.propose([task([3, 5, 6], request_id="b", tenant=b"red")]) == [Drafts.chain((7, 8))]


def test_a_request_that_reuses_nothing_neither_learns_nor_teaches() -> None:
    drafting = drafter()
    ended(drafting, [1, 5, 6, 7, 8], "apart", tenant=None)
    assert drafting.propose([task([3, 5, 6], request_id="a")]) == [NO_DRAFTS]
    ended(drafting, [1, 5, 6, 7, 8], "old")
    assert drafting.propose([task([3, 5, 6], request_id="b", tenant=None)]) == [NO_DRAFTS]
    assert drafting.propose([task([3, 5, 6], request_id="c")]) == [Drafts.chain((7, 8))]


def test_without_memory_only_the_own_text_counts() -> None:
    drafting = drafter(cached=0)
    ended(drafting, [1, 5, 6, 7, 8], "old")
    assert drafting.propose([task([3, 5, 6])]) == [NO_DRAFTS]
    assert drafting.propose([task([5, 6, 7, 8, 5, 6], request_id="own")]) == [Drafts.chain((7, 8))]


def test_what_was_preempted_is_remembered_once_when_it_ends() -> None:
    """Frequencies are those of a request that ran through: 6 followed 5 once, 7 twice."""
    drafting = drafter()
    ended(drafting, [1, 5, 7], "a")
    known = [1, 5, 6, 2]
    drafting.propose([task(known, request_id="p", prompt=1)])
    for _ in range(3):
        drafting.forget("p")
        known += [2]
        drafting.propose([task(known, request_id="p", prompt=1)])
    drafting.forget("p")
    ended(drafting, [1, 5, 7], "c")
    assert drafting.propose([task([4, 5], k=1)]) == [Drafts.chain((7,))]


def test_an_id_used_again_does_not_erase_what_it_meant_before() -> None:
    drafting = drafter()
    ended(drafting, [1, 5, 6, 7, 8], "same")
    ended(drafting, [2, 9, 9, 9], "same")
    assert drafting.propose([task([3, 5, 6])]) == [Drafts.chain((7, 8))]


@given(FEW, st.lists(st.integers(1, 4), max_size=10))
def test_growing_step_by_step_changes_nothing(tokens: list[int], steps: list[int]) -> None:
    """A drafter that sees all tokens at once (after reuse or a resume) agrees."""
    grown, end = drafter(), 0
    for step in [*steps, len(tokens)]:
        end = min(len(tokens), end + step)
        assert grown.propose([task(tokens[:end])]) == drafter().propose([task(tokens[:end])])


def test_the_oldest_outputs_go_first_whoever_they_belong_to() -> None:
    past = PastOutputs(most_outputs=2)
    past.add(b"red", "a", [1, 2, 3])
    past.add(b"blue", "b", [4, 5])
    past.add(b"red", "c", [6])
    assert past.tokens(b"red") is not None and 6 in past.tokens(b"red") and 1 not in past.tokens(b"red")
    past.add(b"blue", "d", [7])
    past.add(b"blue", "e", [8])
    assert past.tokens(b"red") is None and len(past) == 2


@given(st.lists(st.tuples(st.sampled_from([b"x", b"y"]), st.integers(1, 30)), max_size=40))
def test_memory_is_bounded_in_tokens_too(added: list[tuple[bytes, int]]) -> None:
    past = PastOutputs(most_outputs=1000, most_tokens=50)
    for number, (tenant, length) in enumerate(added):
        past.add(tenant, str(number), [number] * length)
        held = [tokens for tokens in (past.tokens(b"x"), past.tokens(b"y")) if tokens is not None]
        assert sum(int((tokens >= 0).sum()) for tokens in held) <= 50
        assert past.tokens(tenant) is not None and number in past.tokens(tenant)
