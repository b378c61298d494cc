"""On-policy text: the target's own answers, to given prompts and to prompts that it invents itself.

Owns: where training text comes from when the user brings none. A draft must guess what this target says, so the
target's own words are the best text there is; and a chat model that is given the opening of a user's turn writes a
user's question, so it never runs out of new prompts. Answers are greedy: that is what the draft is measured on.
Invariant: what is done is on disk after every round, and a later call goes on from there. Held-out prompts never
enter. Called by `cluster.training.train`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError
from cluster.training.hardware import compute_dtype
from cluster.training.options import TrainDraftOptions
from cluster.training.samples import Sample, append_samples, chat_ids, read_own_samples, read_prompts

_ROUND = 256
_BATCH = 64
_FRUITLESS_ROUNDS = 3
_SEEDS_A_SAMPLE = 1 << 20
_PROMPT_TOKENS = 100
_GREEDY = 0.0
_VARIED = 0.7
_SLOT = "\N{OBJECT REPLACEMENT CHARACTER}"

Progress = Callable[[int], None]


def answer_prompts(
    options: TrainDraftOptions,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    path: Path,
    progress: Progress,
) -> list[Sample]:
    """Greedy float32 answers of `held_out_tokens` at most to all `prompts`, in order; kept in `path`."""
    samples = read_own_samples(path)
    missing = [chat_ids(tokenizer, prompt) for prompt in prompts[len(samples) :]]
    if missing:
        with _answerer(options, "float32", options.seed) as answer:
            for start in range(0, len(missing), _BATCH):
                part = missing[start : start + _BATCH]
                answers = answer(part, SamplingParams(max_tokens=options.held_out_tokens, temperature=_GREEDY))
                new = [Sample((*ids, *event.token_ids), len(ids)) for ids, event in zip(part, answers, strict=True)]
                samples += new
                append_samples(path, new)
                progress(len(samples))
    return samples


def build_corpus(
    options: TrainDraftOptions, tokenizer: Tokenizer, held_out: Sequence[str], progress: Progress
) -> list[Sample]:
    """`options.tokens` answer tokens and up to a round more, kept in the work folder; `progress` is told their number.

    Raises `ConfigError` when the target's chat template has no place to invent prompts in.
    """
    path = options.work / "corpus.jsonl"
    samples = read_own_samples(path)
    known = {sample.tokens[: sample.prompt_tokens] for sample in samples}
    known |= {tuple(chat_ids(tokenizer, prompt)) for prompt in held_out}
    done = sum(len(sample.tokens) - sample.prompt_tokens for sample in samples)
    progress(done)
    if done >= options.tokens:
        return samples
    dtype = str(compute_dtype(options.compute_dtype)).removeprefix("torch.")
    # What an earlier call drew is not drawn again.
    with _answerer(options, dtype, options.seed + len(samples) * _SEEDS_A_SAMPLE) as answer:
        for ids, temperature in _rounds(options, tokenizer, answer, known):
            sampling = SamplingParams(max_tokens=options.answer_tokens, temperature=temperature)
            new = [
                Sample((*prompt, *event.token_ids), len(prompt))
                for prompt, event in zip(ids, answer(ids, sampling), strict=True)
                if len(event.token_ids) > 1
            ]
            append_samples(path, new)
            samples += new
            done += sum(len(sample.tokens) - sample.prompt_tokens for sample in new)
            progress(min(done, options.tokens))
            if done >= options.tokens:
                break
    return samples


Answer = Callable[[Sequence[Sequence[int]], SamplingParams], list[RequestEvent]]


def _rounds(
    options: TrainDraftOptions, tokenizer: Tokenizer, answer: Answer, known: set[tuple[int, ...]]
) -> Iterator[tuple[list[list[int]], float]]:
    """Rounds of unanswered prompts, with the temperature to answer at: given ones first, then invented ones."""
    given = [chat_ids(tokenizer, prompt) for path in options.prompts for prompt in read_prompts(path)]
    given = [ids for ids in given if len(ids) + 2 <= options.max_len and tuple(ids) not in known]
    for repeat in range(options.answers_per_prompt):
        for start in range(0, len(given), _ROUND):
            yield given[start : start + _ROUND], _GREEDY if repeat == 0 else _VARIED
    known |= {tuple(ids) for ids in given}
    opening = _user_turn(tokenizer)
    sampling = SamplingParams(max_tokens=_PROMPT_TOKENS, temperature=1.0, top_k=64)
    fruitless = 0
    while fruitless < _FRUITLESS_ROUNDS:
        fresh = []
        for event in answer([opening] * _ROUND, sampling):
            ids = chat_ids(tokenizer, tokenizer.decode(event.token_ids))
            # A turn that did not end is no question, and one of a few tokens is an accident.
            ended = event.finish is FinishReason.STOP and len(event.token_ids) > 3
            if ended and tuple(ids) not in known:
                known.add(tuple(ids))
                fresh.append(ids)
        fruitless = 0 if fresh else fruitless + 1
        yield fresh, _GREEDY
    raise ConfigError("model invents no user prompts from its chat template; give text with data, or more prompts.")


def _user_turn(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the user's words would stand."""
    opening, found, _ = tokenizer.render_chat([{"role": "user", "content": _SLOT}]).partition(_SLOT)
    if not found or not opening:
        raise ConfigError("model has no chat template that opens a user turn; give text with data.")
    return list(tokenizer.backend.encode(opening, add_special_tokens=False).ids)


@contextmanager
def _answerer(options: TrainDraftOptions, dtype: str, first_seed: int) -> Iterator[Answer]:
    """A function that has the engine answer a list of prompts, each request with a seed of its own."""
    engine = Engine(
        EngineConfig(
            model=options.model, dtype=dtype, max_batch=_BATCH, max_queue=_ROUND, chunk=None, threads=options.threads
        )
    )
    seeds = itertools.count(first_seed)

    def answer(prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[RequestEvent]:
        requests = [
            EngineRequest(f"train-{seed}", tuple(prompt), replace(sampling, seed=seed))
            for prompt, seed in zip(prompts, seeds, strict=False)
        ]
        events = engine.generate(requests)
        for event in events:
            if event.error is not None:
                raise event.error
        return events

    try:
        yield answer
    finally:
        engine.close()
