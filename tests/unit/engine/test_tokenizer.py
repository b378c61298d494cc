"""A tokenizer folder is read without running anything from it, and what it refuses is said in one sentence."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from cluster.engine.tokenizer import Tokenizer
from cluster.errors import InvalidRequest, ModelLoadError

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}{{- raise_exception('no tools here') -}}{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' ~ note|default('') -}}{%- endif -%}"
)


def save(folder: Path, template: str | None) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{role}|>", special=True) for role in ("user", "assistant")])
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(save(tmp_path, TEMPLATE))


@pytest.mark.parametrize("text", ["plain", "é 好 🍎", ""])
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt is broken at character 2"):
        tokenizer.encode("ab\ud800")


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """Whatever settings the file was saved with."""
    folder = save(tmp_path, TEMPLATE)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(folder / "tokenizer.json"))
    assert [len(Tokenizer.load(folder).encode(text)) for text in ("ab", "abcdefgh")] == [2, 8]


def test_chat_messages_become_the_template_with_its_special_tokens(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|user|>hi<|assistant|>"
    assert tokenizer.encode_chat(messages) == [256, *tokenizer.encode("hi"), 257]
    assert tokenizer.vocab_size == 258


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages, note="!").endswith("<|assistant|>!")


def test_what_the_template_refuses_is_told_to_the_user(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"messages is a conversation of 1 messages.*\(no tools here\)"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])


def test_an_empty_conversation_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        tokenizer.render_chat([])


def test_a_model_without_a_template_refuses_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="without a chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_can_not_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(InvalidRequest, match="messages"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json: save"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="can't be read") as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_detokenizer_follows_the_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.detokenizer(tokenizer.encode("a ")).feed(tokenizer.encode("b")) == "b"
