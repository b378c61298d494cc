"""Text to token ids and back, and chat templates, from a Hugging Face tokenizer folder.

Owns how a folder is read: local files only, no code from the folder; templates are rendered in transformers' Jinja
sandbox. Invariant: an error is one sentence for the user. Called by the gateway (prompts) and the engine (text).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.engine.detokenizer import IncrementalDetokenizer
from cluster.errors import InvalidRequest, ModelLoadError


class Tokenizer:
    """A fast tokenizer of one model. Encoding and decoding may be called from several threads."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast
        self.backend: tokenizers.Tokenizer = fast.backend_tokenizer
        # A file may carry settings from training; a prompt is never cut or padded silently.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = max(fast.get_vocab().values()) + 1
        """Number of token ids, added tokens included: ids lie in [0, vocab_size)."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`. Raises ModelLoadError if it holds no fast tokenizer."""
        if not (folder / "tokenizer.json").is_file():
            raise ModelLoadError(
                f"The model folder {folder} has no tokenizer.json: save the model's fast tokenizer into it."
            )
        try:
            fast = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds for a damaged file
            raise ModelLoadError(
                f"The tokenizer in {folder} can't be read ({_first_line(error)}): save it again."
            ) from error
        if not isinstance(fast, PreTrainedTokenizerFast):
            raise ModelLoadError(f"The tokenizer in {folder} is not a fast one: convert it to tokenizer.json.")
        return cls(fast)

    @property
    def has_chat_template(self) -> bool:
        return self._fast.chat_template is not None

    def vocabulary(self) -> dict[str, int]:
        """Token strings to ids, added tokens included."""
        return dict(self._fast.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as a plain prompt: with the model's own start token, if it has one.

        Raises InvalidRequest for text that isn't valid Unicode.
        """
        return self._encode("prompt", text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt that the model's template makes of `messages`, ready for the assistant's answer.

        Raises InvalidRequest if the model has no template, or if the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages",
                f"a conversation of {len(messages)} messages",
                "absent for a model without a chat template",
                "send a plain prompt, or serve an instruction-tuned model",
            )
        conversation = [dict(message) for message in messages]
        try:
            text = self._fast.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **variables)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                "messages",
                f"a conversation of {len(messages)} messages",
                f"what the model's chat template accepts ({_first_line(error)})",
                "change the roles or their order",
            ) from error
        return str(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of the rendered `messages`; the template writes special tokens itself, so none are added."""
        return self._encode("messages", self.render_chat(messages, **variables), add_special_tokens=False)

    def _encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            limit = "valid Unicode, without lone surrogates"
            raise InvalidRequest(field, f"broken at character {error.start}", limit, "send UTF-8 text") from error
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` on their own."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for the output that follows `prompt`."""
        return IncrementalDetokenizer(self.backend, prompt, skip_special_tokens)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
