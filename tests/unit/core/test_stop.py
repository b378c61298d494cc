"""Stop strings in text that arrives in pieces of any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.stop import StopMatcher

text = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def up_to_the_first_stop(whole: str, stops: list[str]) -> tuple[str, bool]:
    """What must come out: cut where the first stop string is complete."""
    for end in range(1, len(whole) + 1):
        hits = [stop for stop in stops if whole[:end].endswith(stop)]
        if hits:
            return whole[: end - max(map(len, hits))], True
    return whole, False


@given(stops, st.lists(text, max_size=6))
def test_the_output_does_not_depend_on_how_the_text_was_cut(stops: list[str], pieces: list[str]) -> None:
    matcher, emitted = StopMatcher(stops), ""
    for piece in pieces:
        out, matched = matcher.feed(piece)
        emitted += out
        assert matched == matcher.matched
    emitted += matcher.flush()
    assert (emitted, matcher.matched) == up_to_the_first_stop("".join(pieces), stops)


@given(stops, st.lists(text, max_size=6))
def test_what_is_emitted_is_never_taken_back(stops: list[str], pieces: list[str]) -> None:
    expected, _ = up_to_the_first_stop("".join(pieces), stops)
    matcher, emitted = StopMatcher(stops), ""
    for piece in pieces:
        emitted += matcher.feed(piece)[0]
        assert expected.startswith(emitted)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("one </") == ("one ", False)
    assert matcher.feed("b>") == ("</b>", False)
    assert matcher.feed("two</s>three") == ("two", True)
    assert matcher.feed("four") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
