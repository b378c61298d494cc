"""What the choices of `speculative.draft_gap` are worth: long chats whose draft blocks were evicted.

A chat of the model's own answers fills both pools. Then the draft's pool gives up all that it holds, and an answer is
measured: `clip` computes the whole chat again in both models, `skip` starts at the target's depth, and `auto` does one
or the other, by the costs and the acceptance that it has learnt. Each round has a new chat, and the choices take turns;
a figure is the median of the rounds.
Called by `tandem bench gap`.

    draft_gap.<choice>.ttft          seconds to the first token of the answer
    draft_gap.<choice>.acceptance    tokens of a target step that verified drafts
    draft_gap.<choice>.total         seconds to the end of the answer
    draft_gap.<choice>.skipped       share of the rounds in which the gap was left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import torch

from cluster.bench.engine import BenchModel
from cluster.core.draft_gap import DraftGap
from cluster.core.paired_cache import DRAFT
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, Usage

TINY_QUESTIONS = (
    "Count from 12 to 40.",
    "Repeat after me:\nsalt Food potatoes pony lamb monkey fox",
    "Count from 89 to 60.",
    "Repeat after me:\nrice corn goat horse river",
    "Count from 31 to 69.",
)
"""Tasks that the tests' tiny models know."""

_KV_BYTES = 512 << 20
_ANSWER = 48
"""Most tokens of the answers that make up a chat."""


@dataclass(frozen=True)
class GapCase:
    """A chat of about `context` tokens, and an answer of `new_tokens` that is measured; so often."""

    context: int = 1000
    new_tokens: int = 64
    rounds: int = 5
    threads: int | None = None


def run_gap_bench(model: BenchModel, case: GapCase, progress: Callable[[str], None]) -> dict[str, float]:
    """Flat figures. Raises ModelLoadError or ConfigError for a model that can't be served."""
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    engines = {choice: _engine(model, choice) for choice in DraftGap}
    usages: dict[DraftGap, list[Usage]] = {choice: [] for choice in DraftGap}
    for turn in range(case.rounds + 1):
        progress(f"{model.name}: a chat of {case.context} tokens, round {turn} of {case.rounds}")
        prompt = _chat(engines[DraftGap.CLIP], model.questions, turn, case.context)
        for choice, engine in engines.items():
            usage = _after_eviction(engine, prompt, case.new_tokens)
            if turn:  # the first round only warms up
                usages[choice].append(usage)
    for engine in engines.values():
        engine.close()
    return {
        f"draft_gap.{choice}.{key}": value for choice in DraftGap for key, value in _figures(usages[choice]).items()
    }


def _figures(usages: Sequence[Usage]) -> dict[str, float]:
    return {
        "ttft": median(usage.ttft_s or 0.0 for usage in usages),
        "acceptance": 1 + sum(usage.accepted for usage in usages) / max(1, sum(usage.draft_steps for usage in usages)),
        "total": median(usage.total_s for usage in usages),
        "skipped": sum(usage.reused_joint > usage.reused_draft for usage in usages) / len(usages),
    }


def _chat(engine: Engine, questions: Sequence[str], first: int, context: int) -> tuple[int, ...]:
    """Tokens of a chat that ends with a question; which one begins it depends on `first`."""
    tokens: tuple[int, ...] = ()
    for question in islice(cycle(questions), first, None):
        tokens += _question(engine, question)
        if len(tokens) >= context:
            return tokens
        tokens += _answer(engine, tokens, _ANSWER).tokens
    raise RuntimeError("a chat needs questions")


def _question(engine: Engine, question: str) -> tuple[int, ...]:
    tokenizer = engine.parts.tokenizer
    if tokenizer is None:
        raise RuntimeError("gaps are measured on text, which needs a tokenizer")
    return tuple(tokenizer.encode_chat([{"role": "user", "content": question}]))


def _after_eviction(engine: Engine, prompt: tuple[int, ...], new_tokens: int) -> Usage:
    _answer(engine, prompt, 1)
    engine.parts.cache.pools[DRAFT].tree.evict(engine.parts.kv[DRAFT].num_blocks)
    return _answer(engine, prompt, new_tokens, ignore_eos=True).usage


@dataclass(frozen=True)
class _Answered:
    tokens: tuple[int, ...]
    usage: Usage


def _answer(engine: Engine, prompt: tuple[int, ...], new_tokens: int, ignore_eos: bool = False) -> _Answered:
    sampling = SamplingParams(new_tokens, temperature=0, ignore_eos=ignore_eos)
    (event,) = engine.generate([EngineRequest("gap", prompt, sampling)])
    if event.usage is None:
        raise RuntimeError("a finished request has no usage")
    return _Answered(tuple(event.token_ids), event.usage)


def _engine(model: BenchModel, choice: DraftGap) -> Engine:
    return Engine(
        EngineConfig(model=model.target, draft=model.draft, method=model.method, kv_bytes=_KV_BYTES, draft_gap=choice)
    )
