"""Training text from the target itself and from users' files, and one whole training on it."""

import json
from pathlib import Path

import pytest
import torch

from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.training import corpus
from cluster.training.corpus import build_corpus
from cluster.training.options import TrainDraftOptions
from cluster.training.samples import chat_ids, read_own_samples, read_prompts, read_samples
from cluster.training.train import train_draft

TARGET = Path(__file__).parents[2] / "fixtures" / "models" / "tiny-target"
PROMPTS = ("How many boxes are there?", "Who has the red ball?", "Count to five.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET)


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_ROUND", 32)
    monkeypatch.setattr(corpus, "_PROMPT_TOKENS", 64)
    monkeypatch.setattr(corpus, "_FRUITLESS_ROUNDS", 50)  # the tiny model was never taught to write users' turns


def prompt_file(path: Path, prompts: tuple[str, ...] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def options(folder: Path, **changes: object) -> TrainDraftOptions:
    values: dict[str, object] = {
        "model": TARGET,
        "out": folder,
        "prompts": (prompt_file(folder / "prompts.jsonl"),),
        "answer_tokens": 12,
        "held_out_tokens": 12,
        "threads": 1,
        "compute_dtype": "float32",
    }
    (folder / "work").mkdir(exist_ok=True)
    return TrainDraftOptions(**(values | changes))  # type: ignore[arg-type]


def test_given_prompts_are_answered_first_then_invented_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    held_out = [PROMPTS[2]]
    seen: list[int] = []
    samples = build_corpus(options(tmp_path, tokens=200), tokenizer, held_out, seen.append)
    asked = [list(sample.tokens[: sample.prompt_tokens]) for sample in samples]
    assert asked[:2] == [chat_ids(tokenizer, prompt) for prompt in PROMPTS[:2]]
    assert chat_ids(tokenizer, PROMPTS[2]) not in asked
    assert len({tuple(ids) for ids in asked}) == len(asked) > 2
    assert seen == sorted(seen) and seen[-1] == 200
    assert all(len(sample.tokens) - sample.prompt_tokens <= 12 for sample in samples)


def test_a_later_call_goes_on_from_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = build_corpus(options(tmp_path, tokens=20), tokenizer, [], lambda done: None)
    path = tmp_path / "work" / "corpus.jsonl"
    path.write_text(path.read_text() + '{"tokens": [1, 2')  # as if it had been stopped while it wrote
    more = build_corpus(options(tmp_path, tokens=150), tokenizer, [], lambda done: None)
    assert more[: len(first)] == first
    assert len(more) > len(first)
    assert read_own_samples(path) == more


def test_users_files_are_read_in_every_form(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": "Three."}]
    documents = [{"tokens": [5, 6, 7], "prompt_tokens": 1}, {"messages": chat}, {"text": "One two three four."}]
    lines.write_text("".join(json.dumps(document) + "\n" for document in documents))
    ids, talk, text = read_samples(lines, tokenizer)
    assert ids.tokens == (5, 6, 7)
    assert list(talk.tokens[: talk.prompt_tokens]) == chat_ids(tokenizer, PROMPTS[0])
    assert tokenizer.decode(talk.tokens[talk.prompt_tokens :]) == "Three."
    assert tokenizer.decode(text.tokens) == "One two three four."
    plain = tmp_path / "data.txt"
    plain.write_text("A first document.\nIts second line.\n\n\nAnd another one.")
    assert [tokenizer.decode(s.tokens) for s in read_samples(plain, tokenizer)] == [
        "A first document.\nIts second line.",
        "And another one.",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [("[1]", "line 1 is not a JSON object"), ("{}", "none of tokens, messages, text"), ("{", "line 1 is not a JSON")],
)
def test_lines_that_are_no_samples_are_named(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_samples(path, tokenizer)
    with pytest.raises(ConfigError, match="no such file"):
        read_samples(tmp_path / "absent.jsonl", tokenizer)


def test_prompts_come_from_the_usual_fields(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    documents = [{"turns": ["a", "b"]}, {"prompt": "c"}, {"instruction": "d"}, {"question": "e"}]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    assert read_prompts(path) == ["a", "c", "d", "e"]


def test_a_whole_training_from_nothing_but_the_model(tmp_path: Path) -> None:
    held_out = prompt_file(tmp_path / "held-out.jsonl", PROMPTS[2:])
    asked = options(tmp_path, held_out=held_out, tokens=100, token_passes=2000, max_len=128, draft_vocab=256)
    result = train_draft(asked)
    assert result.acceptance is not None and 1.0 <= result.acceptance <= 4.0
    assert result.token_passes >= 2000 and result.samples > 1
    zeros = torch.zeros(2048, 192)
    head = Eagle3Head.load(tmp_path, BorrowedWeights(zeros, zeros), torch.float32)
    assert head.config.draft_vocab_size == 256
    assert (tmp_path / "curve.jsonl").read_text()
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert train_draft(asked).token_passes == result.token_passes  # all of it is there: nothing is trained again
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_text_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"tokens": [5, 6], "prompt_tokens": 1}\n')
    with pytest.raises(ConfigError, match="no sample of 3 to"):
        train_draft(options(tmp_path, data=data))
