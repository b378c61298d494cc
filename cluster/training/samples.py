"""Training text: token sequences with the position where the target's own words begin.

Owns: the JSONL form of a sample and the reading of users' files. Invariant: `0 < prompt_tokens < len(tokens)`: there
is always something before the answer and something in it.

A line of a .jsonl file is one of
    {"tokens": [...], "prompt_tokens": n}              token ids, as this package writes them
    {"messages": [{"role": ..., "content": ...}, ...]} a chat whose last message is the answer
    {"text": "..."}                                    plain text, all of it learned
and any other file is plain text whose documents are separated by blank lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """Token ids, the first `prompt_tokens` of which are context; the rest is learned."""

    tokens: tuple[int, ...]
    prompt_tokens: int

    def cut(self, max_len: int) -> Sample | None:
        """The sample within `max_len` tokens, or None if nothing would be left to learn."""
        if self.prompt_tokens + 2 > min(max_len, len(self.tokens)):
            return None
        return Sample(self.tokens[:max_len], self.prompt_tokens)


def read_samples(path: Path, tokenizer: Tokenizer) -> list[Sample]:
    """All samples of a user's file. Raises `ConfigError` naming the first line that can't be read."""
    if not path.is_file():
        raise ConfigError(f"data is {path} but there is no such file; give a .jsonl or a text file.")
    if path.suffix != ".jsonl":
        documents = (block.strip() for block in path.read_text(errors="replace").split("\n\n"))
        return [sample for text in documents if text and (sample := _from_text(text, tokenizer)) is not None]
    return list(_parse_lines(path, tokenizer))


def read_own_samples(path: Path) -> list[Sample]:
    """Samples written by `append_samples`; a line cut short by an interruption is left out."""
    samples = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            samples.append(_from_ids(json.loads(line)))
        except ValueError:
            continue
    return samples


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Adds samples to a .jsonl file; a line that an interruption cut short is closed, so that it spoils no other."""
    cut_short = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        if cut_short:
            file.write("\n")
        file.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)


def read_prompts(path: Path) -> list[str]:
    """User prompts of a JSONL file with a field `prompt`, `instruction`, `question` or `turns` (the first is taken)."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        document = _object(path, number, line)
        turns = document.get("turns")
        text = (
            turns[0]
            if turns
            else next((document[k] for k in ("prompt", "instruction", "question") if k in document), "")
        )
        if not text:
            raise ConfigError(
                f"{path} line {number} has no prompt; give a field prompt, instruction, question or turns."
            )
        prompts.append(str(text))
    return prompts


def chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a chat with one user message, open for the answer."""
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _parse_lines(path: Path, tokenizer: Tokenizer) -> Iterator[Sample]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        document = _object(path, number, line)
        if "tokens" in document:
            yield _from_ids(document)
        elif "messages" in document:
            yield _from_messages(document["messages"], tokenizer)
        elif "text" in document:
            sample = _from_text(document["text"], tokenizer)
            if sample is not None:
                yield sample
        else:
            raise ConfigError(f"{path} line {number} has none of tokens, messages, text; give one of them.")


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} line {number} is not a JSON object; write one object a line.")
    return document


def _from_ids(document: dict[str, Any]) -> Sample:
    sample = Sample(tuple(document["tokens"]), int(document["prompt_tokens"]))
    if not 0 < sample.prompt_tokens < len(sample.tokens):
        raise ConfigError(
            f"prompt_tokens is {sample.prompt_tokens} but must lie in 1 to {len(sample.tokens) - 1}; correct the line."
        )
    return sample


def _from_messages(messages: list[dict[str, str]], tokenizer: Tokenizer) -> Sample:
    opened = tokenizer.encode_chat(messages[:-1])
    return Sample((*opened, *_plain_ids(messages[-1]["content"], tokenizer)), len(opened))


def _from_text(text: str, tokenizer: Tokenizer) -> Sample | None:
    ids = _plain_ids(text, tokenizer)
    return Sample(tuple(ids), 1) if len(ids) > 2 else None


def _plain_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)
