"""The error tree: sentences for users, and copies that keep every field."""

import pickle

import pytest

from cluster import errors

EVERY_ERROR = [
    errors.ConfigError("port is 70000, but must be at most 65535: choose another."),
    errors.ModelLoadError("The folder is missing: name another."),
    errors.InvalidRequest("temperature", float("nan"), "from 0 to 2", "send a number in that range"),
    errors.PromptTooLarge(needed_blocks=20, available_blocks=16, largest_prompt=240),
    errors.ModelNotFound("gpt", ("tiny",)),
    errors.Unauthenticated("authorization is missing."),
    errors.CapacityExceeded("The queue is full.", retry_after_s=0.5),
    errors.StaleEpoch(requested=1, current=2),
    errors.Unavailable("No worker."),
    errors.DeadlineExceeded("Too late."),
    errors.RequestCancelled("Cancelled."),
    errors.Internal("abc"),
]


def test_every_class_of_the_tree_is_covered_here() -> None:
    classes = {each for each in vars(errors).values() if isinstance(each, type)}
    defined = {each for each in classes if issubclass(each, errors.TandemError)}
    assert {type(each) for each in EVERY_ERROR} == defined - {errors.TandemError}


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_a_copy_has_the_class_the_sentence_and_the_fields(error: errors.TandemError) -> None:
    for copy in (pickle.loads(pickle.dumps(error)), errors.revive(type(error).__name__, error.fields)):  # noqa: S301
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert repr(copy.fields) == repr(error.fields)


def test_an_unknown_kind_becomes_the_root_with_the_same_sentence() -> None:
    error = errors.revive("FromANewerServer", {"message": "Something new: upgrade."})
    assert type(error) is errors.TandemError
    assert str(error) == "Something new: upgrade."


def test_an_invalid_request_names_field_value_limit_and_remedy() -> None:
    error = errors.InvalidRequest("top_k", 0, "from 1 to 512", "send a number in that range")
    assert str(error) == "top_k is 0, but must be from 1 to 512: send a number in that range."


def test_values_are_shown_short_and_printable() -> None:
    assert errors.show("a" * 1000) == "a" * 64 + "…"
    assert errors.show("\x1b[2J\n") == "\ufffd[2J\ufffd"
    assert errors.show("") == "empty"
