"""The engine against transformers' `generate`, warm prefixes against cold, speculation against none.

Contenders take turns within one run, and a ratio is the median over the rounds of the ratio within a round: a machine
that slows down for a while slows both. Prompts are new in every round, so nothing is reused unless reuse is what is
measured.
Called by `tandem bench engine`.

    engine.<model>.b<N>.tokens_per_s           N requests at once, prompts of differing length, equally many tokens each
    engine.<model>.b<N>.generate_tokens_per_s  the same by transformers' `generate`, one left-padded batch
    engine.<model>.b<N>.vs_generate            the ratio of the two; above 1 the engine is faster
    ttft.cold_s, ttft.warm_s                   time to first token, with a prefix of 1,000 tokens computed or reused
    ttft.warm_over_cold                        their ratio; 0.2 is five times shorter
    spec.vs_none, spec.acceptance              tokens/s with speculation over without; mean tokens a target step yields
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from cluster.bench.generate import Generate
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.speculation.lookahead import SpeculationMethod

Progress = Callable[[str], None]
Prompt = tuple[int, ...]

_KV_BYTES = 512 << 20
_PREFIX_TOKENS = 1000
_QUESTIONS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Explain why the sky is blue.",
    "Give me a recipe for pancakes.",
    "List five animals that live in Africa.",
    "What should I do on a rainy day?",
    "Count from one to twenty.",
    "Tell me a short story about a dog.",
)


@dataclass(frozen=True)
class BenchModel:
    """A target to measure. `draft` is the folder of its draft, None to leave speculation out."""

    name: str
    target: Path
    draft: Path | None = None
    method: SpeculationMethod = SpeculationMethod.EAGLE3
    questions: tuple[str, ...] = _QUESTIONS


@dataclass(frozen=True)
class Effort:
    """How much is measured. Prompts have half to one and a half times `prompt_tokens`."""

    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    prompt_tokens: int = 64
    new_tokens: int = 32
    threads: int | None = None


@dataclass
class Report:
    """`figures` are flat; `rows` the same for a table: what, ours, theirs, ratio."""

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def rates(
        self, key: str, what: str, ours: Sequence[float], theirs: Sequence[float], names: tuple[str, str]
    ) -> float:
        """Add two rates (tokens/s) measured in pairs; returns the median of the pairs' ratios."""
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        self.figures[f"{key}.{names[0]}"] = median(ours)
        self.figures[f"{key}.{names[1]}"] = median(theirs)
        self.rows.append((what, f"{median(ours):.1f} tokens/s", f"{median(theirs):.1f} tokens/s", f"{ratio:.2f}"))
        return ratio


def run_engine_bench(models: Sequence[BenchModel], effort: Effort, progress: Progress) -> Report:
    """Measure each of `models`; prefix reuse and speculation on the last one that has a draft (or on the last one).

    Raises ModelLoadError or ConfigError for a model that can't be served.
    """
    if effort.threads is not None:
        torch.set_num_threads(effort.threads)
    report = Report()
    for model in models:
        _against_generate(model, effort, report, progress)
    chosen = next((model for model in reversed(models) if model.draft is not None), models[-1])
    _warm_against_cold(chosen, effort, report, progress)
    if chosen.draft is not None:
        _speculation_against_none(chosen, effort, report, progress)
    return report


# ------------------------------------------------------------ against generate()


def _against_generate(model: BenchModel, effort: Effort, report: Report, progress: Progress) -> None:
    engine = _engine(model, speculate=False, reuse=False)
    other = Generate(model.target)
    rng = random.Random(0)
    for batch in effort.batches:
        _time(engine, _prompts(engine, rng, batch, effort.prompt_tokens), 2)
        other.run(_prompts(engine, rng, batch, effort.prompt_tokens), 2)
        ours, theirs = [], []
        for turn in range(effort.rounds):
            progress(f"{model.name}: {batch} at once, round {turn + 1} of {effort.rounds}")
            prompts = _prompts(engine, rng, batch, effort.prompt_tokens)
            tokens = batch * effort.new_tokens
            ours.append(tokens / _time(engine, prompts, effort.new_tokens))
            theirs.append(tokens / other.run(prompts, effort.new_tokens))
        key = f"engine.{model.name}.b{batch}"
        names = ("tokens_per_s", "generate_tokens_per_s")
        what = f"{model.name}, {batch} at once: engine, generate()"
        report.figures[f"{key}.vs_generate"] = report.rates(key, what, ours, theirs, names)
    engine.close()


def _time(engine: Engine, prompts: Sequence[Prompt], new_tokens: int) -> float:
    """Seconds to answer all `prompts` with `new_tokens` each."""
    requests = [_request(i, prompt, new_tokens) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - start


def _request(number: int, prompt: Prompt, new_tokens: int) -> EngineRequest:
    sampling = SamplingParams(new_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(f"bench-{number}", prompt, sampling)


def _prompts(engine: Engine, rng: random.Random, count: int, tokens: int) -> list[Prompt]:
    lengths = [rng.randint(tokens // 2, tokens + tokens // 2) for _ in range(count)]
    return [_random_tokens(engine, rng, length) for length in lengths]


def _random_tokens(engine: Engine, rng: random.Random, count: int) -> Prompt:
    """Ordinary tokens: the first ids of a vocabulary are often special."""
    vocabulary = engine.parts.target.vocab_size
    return tuple(rng.randrange(min(300, vocabulary // 2), vocabulary) for _ in range(count))


# ------------------------------------------------------------ reuse and speculation


def _warm_against_cold(model: BenchModel, effort: Effort, report: Report, progress: Progress) -> None:
    engine = _engine(model, speculate=model.draft is not None, reuse=True)
    rng = random.Random(1)
    _first_token(engine, _random_tokens(engine, rng, 32))
    cold, warm = [], []
    for turn in range(effort.rounds + 2):
        progress(f"{model.name}: prefix of {_PREFIX_TOKENS} tokens, round {turn + 1} of {effort.rounds + 2}")
        prefix = _random_tokens(engine, rng, _PREFIX_TOKENS)
        cold.append(_first_token(engine, prefix + _random_tokens(engine, rng, 16)))
        warm.append(_first_token(engine, prefix + _random_tokens(engine, rng, 16)))
    ratio = median(w / c for w, c in zip(warm, cold, strict=True))
    report.figures |= {"ttft.cold_s": median(cold), "ttft.warm_s": median(warm), "ttft.warm_over_cold": ratio}
    what = f"{model.name}, first token after {_PREFIX_TOKENS} tokens: warm, cold"
    report.rows.append((what, f"{median(warm) * 1e3:.1f} ms", f"{median(cold) * 1e3:.1f} ms", f"{ratio:.3f}"))
    engine.close()


def _first_token(engine: Engine, prompt: Prompt) -> float:
    (event,) = engine.generate([_request(0, prompt, 4)])
    if event.usage is None or event.usage.ttft_s is None:
        raise RuntimeError("a finished request has no time to first token")
    return event.usage.ttft_s


def _speculation_against_none(model: BenchModel, effort: Effort, report: Report, progress: Progress) -> None:
    engines = [_engine(model, speculate, reuse=False) for speculate in (True, False)]
    prompts = [_question(engines[0], question) for question in model.questions]
    new_tokens = 2 * effort.new_tokens
    for engine in engines:
        _time(engine, prompts[:1], 4)
    rates: tuple[list[float], list[float]] = ([], [])
    for turn, prompt in enumerate(prompts):
        progress(f"{model.name}: speculation, prompt {turn + 1} of {len(prompts)}")
        for engine, measured in zip(engines, rates, strict=True):
            measured.append(new_tokens / _time(engine, [prompt], new_tokens))
    names = ("tokens_per_s", "none_tokens_per_s")
    what = f"{model.name}, one at a time: {model.method}, none"
    report.figures["spec.vs_none"] = report.rates("spec", what, *rates, names)
    report.figures["spec.acceptance"] = engines[0].stats().acceptance_length or 1.0
    for engine in engines:
        engine.close()


def _question(engine: Engine, question: str) -> Prompt:
    tokenizer = engine.parts.tokenizer
    if tokenizer is None:
        raise RuntimeError("speculation is measured on text, which needs a tokenizer")
    if tokenizer.has_chat_template:
        return tuple(tokenizer.encode_chat([{"role": "user", "content": question}]))
    return tuple(tokenizer.encode(question))


def _engine(model: BenchModel, speculate: bool, reuse: bool) -> Engine:
    return Engine(
        EngineConfig(
            model=model.target,
            draft=model.draft if speculate else None,
            method=model.method if speculate else SpeculationMethod.NONE,
            kv_bytes=_KV_BYTES,
            enable_reuse=reuse,
        )
    )
