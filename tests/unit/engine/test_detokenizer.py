"""Streamed text equals decoded text, never shows half a character, and never shows the prompt."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cluster.engine.detokenizer import IncrementalDetokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> tokenizers.Tokenizer:
    """One token per byte (ids 0..255), and a special token <|end|> (256)."""
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Words with a leading sign for the space, stripped at the start of a text, as Llama 2 decodes."""
    words = {"<unk>": 0, "▁The": 1, "▁cat": 2, "▁sat": 3, "s": 4}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


BYTES = byte_level()
END = 256


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def streamed(detokenizer: IncrementalDetokenizer, output: list[int]) -> list[str]:
    return [detokenizer.feed([token]) for token in output] + [detokenizer.flush()]


@given(st.text(max_size=20), st.text(max_size=40))
def test_pieces_of_valid_text_join_to_it_and_hold_whole_characters(prompt: str, output: str) -> None:
    pieces = streamed(IncrementalDetokenizer(BYTES, ids(prompt)), ids(output))
    assert "".join(pieces) == output
    if "\ufffd" not in output:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_of_any_bytes_join_to_the_decoded_text(output: list[int]) -> None:
    assert "".join(streamed(IncrementalDetokenizer(BYTES), output)) == BYTES.decode(output)


@given(st.text(max_size=20), st.text(max_size=20), st.data())
def test_a_state_rebuilt_from_ids_goes_on_as_the_first_one(prompt: str, output: str, data: st.DataObject) -> None:
    tokens = ids(output)
    split = data.draw(st.integers(0, len(tokens)))
    first = IncrementalDetokenizer(BYTES, ids(prompt))
    given_out = first.feed(tokens[:split])
    second, again = IncrementalDetokenizer.resume(BYTES, ids(prompt), tokens[:split])
    assert again == given_out
    assert streamed(second, tokens[split:]) == streamed(first, tokens[split:])


@pytest.mark.parametrize("sign", ["é", "好", "🍎"])
def test_a_prompt_that_ends_inside_a_character_does_not_leak(sign: str) -> None:
    whole = ids("A secret prompt " + sign)
    for cut in range(1, len(sign.encode())):
        pieces = streamed(IncrementalDetokenizer(BYTES, whole[:-cut]), whole[-cut:] + ids(" done"))
        assert "".join(pieces) == sign + " done"


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ids("prompt"))
    assert detokenizer.feed(ids("ok") + ids("好")[:2]) == "ok"
    assert detokenizer.flush() == "\ufffd"


def test_endless_invalid_bytes_are_given_out_after_a_while() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ids("prompt"))
    broken = ids("é")[:1] * 1000
    text = detokenizer.feed(broken)
    assert len(text) > 500
    assert text + detokenizer.feed(ids("fine")) + detokenizer.flush() == "\ufffd" * 1000 + "fine"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    output = [*ids("bye"), END]
    assert "".join(streamed(IncrementalDetokenizer(BYTES), output)) == "bye"
    assert "".join(streamed(IncrementalDetokenizer(BYTES, skip_special_tokens=False), output)) == "bye<|end|>"


def test_the_space_before_the_first_word_of_the_output_is_kept() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([2, 3]) == "cat sat"
    assert "".join(streamed(IncrementalDetokenizer(tokenizer, [1]), [2, 4, 3])) == " cats sat"
