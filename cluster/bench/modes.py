"""Every speculation mode on one target: how much is accepted, what it costs, how much of a chat is reused.

Modes take turns on each prompt within one run, and a mode's ratio to no speculation is the median over the rounds of
the ratio within a round: a machine that slows down for a while slows all. Prompts are new in every round and nothing is
reused in them but by the chats that measure reuse. Called by `tandem bench modes`.

    modes.<mode>.acceptance             mean tokens a target step with drafts yields
    modes.<mode>.vs_none                tokens/s over those without speculation, one request at a time
    modes.<mode>.draft_bytes_per_token  of the draft's KV
    modes.<mode>.reuse                  share of a chat's earlier tokens that its second and third turn did not compute
                                        again, in either pool
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import torch

from cluster.bench.mode_chats import Message, single_turns, three_turns
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, Usage
from cluster.speculation.lookahead import (
    DraftFolder,
    SpeculationMethod,
    draft_folder,
    drafts_trees,
    has_draft_kv,
)

Tell = Callable[[str], None]
_KV_BYTES = 64 << 20
_DRAFTS = 3
_TREE_WIDTH, _TREE_TOKENS = 3, 12
_CHATS = 3


@dataclass(frozen=True, slots=True)
class Mode:
    """A method with its draft, by chains or by trees."""

    method: SpeculationMethod
    draft: Path | None = None
    tree: bool = False

    @property
    def name(self) -> str:
        """As in the keys."""
        return f"{self.method}_tree" if self.tree else str(self.method)


@dataclass(frozen=True, slots=True)
class ModeEffort:
    """`prompts` are asked in each of `rounds`, for at most `new_tokens` each."""

    rounds: int = 5
    prompts: int = 6
    new_tokens: int = 48
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """See the module. `tokens_per_s` is the median over the rounds."""

    acceptance: float
    tokens_per_s: float
    vs_none: float
    draft_bytes_per_token: int
    reuse: float

    def keys(self, mode: str) -> dict[str, float]:
        """The figures by their flat keys."""
        names = ("acceptance", "vs_none", "draft_bytes_per_token", "reuse")
        return {f"modes.{mode}.{name}": getattr(self, name) for name in names}


def modes_of(drafts: Mapping[SpeculationMethod, Path], tell: Tell) -> list[Mode]:
    """All modes for which a draft is named or none is needed; `tell` hears which are left out."""
    modes: list[Mode] = []
    for method in SpeculationMethod:
        if method is SpeculationMethod.NONE:
            continue
        draft = drafts.get(method)
        if draft is None and draft_folder(method) is not DraftFolder.NEVER:
            tell(f"{method} is left out: no draft is named for it (--draft {method}=DIR)")
            continue
        modes.append(Mode(method, draft))
        if drafts_trees(method):
            modes.append(Mode(method, draft, tree=True))
    return modes


def run_modes_bench(target: Path, modes: Sequence[Mode], effort: ModeEffort, progress: Tell) -> dict[str, ModeFigures]:
    """Measure `modes` on `target`, by their names; method none comes first.

    Raises ModelLoadError or ConfigError for a model or a draft that can't be served.
    """
    if effort.threads is not None:
        torch.set_num_threads(effort.threads)
    runs = []
    for mode in [Mode(SpeculationMethod.NONE), *modes]:
        progress(f"{mode.name}: loading")
        runs.append(_Run(mode, _engine(target, mode)))
    _ask_in_turns(runs, effort, progress)
    figures = {}
    for run in runs:
        progress(f"{run.mode.name}: chats of three turns")
        figures[run.mode.name] = run.figures(against=runs[0])
        run.engine.close()
    return figures


def _ask_in_turns(runs: Sequence[_Run], effort: ModeEffort, progress: Tell) -> None:
    for run in runs:
        run.ask(single_turns(Random("warm"), 3), "warm", effort.new_tokens)
        run.forget_measurements()
    for turn in range(effort.rounds):
        chats = single_turns(Random(f"round {turn}"), effort.prompts)
        for run in runs:
            run.begin_round()
        for number, chat in enumerate(chats):
            progress(f"round {turn + 1} of {effort.rounds}, prompt {number + 1} of {len(chats)}")
            for run in runs:
                run.ask([chat], f"{turn}", effort.new_tokens)


@dataclass
class _Run:
    """One mode's engine and what was measured on it: seconds and tokens of each round."""

    mode: Mode
    engine: Engine
    seconds: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[int] = field(default_factory=lambda: [0])
    draft_steps: int = 0
    accepted: int = 0

    def forget_measurements(self) -> None:
        self.seconds, self.tokens, self.draft_steps, self.accepted = [], [], 0, 0

    def begin_round(self) -> None:
        self.seconds.append(0.0)
        self.tokens.append(0)

    def ask(self, chats: Sequence[Sequence[Message]], tenant: str, new_tokens: int) -> None:
        """One at a time. Tenants don't share what drafters remember."""
        for chat in chats:
            sampling = SamplingParams(new_tokens, temperature=0)
            request = EngineRequest(
                "bench", _encode(self.engine, chat), sampling, tenant_salt=tenant.encode(), reuse=False
            )
            start = time.perf_counter()
            (event,) = self.engine.generate([request])
            self.seconds[-1] += time.perf_counter() - start
            self.tokens[-1] += len(event.token_ids)
            usage = _usage(event.usage)
            self.draft_steps += usage.draft_steps
            self.accepted += usage.accepted

    def figures(self, against: _Run) -> ModeFigures:
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]
        others = [tokens / seconds for tokens, seconds in zip(against.tokens, against.seconds, strict=True)]
        draft = self.engine.parts.kv.get("draft")
        return ModeFigures(
            acceptance=1 + self.accepted / max(1, self.draft_steps),
            tokens_per_s=median(rates),
            vs_none=median(ours / theirs for ours, theirs in zip(rates, others, strict=True)),
            draft_bytes_per_token=0 if draft is None else draft.layout.bytes_per_token,
            reuse=_reuse(self.engine, self.mode.method),
        )


def _reuse(engine: Engine, method: SpeculationMethod) -> float:
    """Over the second and third turns of some chats: tokens reused of those whose KV the turn before computed."""
    reused = possible = 0
    for number in range(_CHATS):
        messages: list[Message] = []
        before: tuple[int, ...] = ()
        for said in three_turns(Random(f"chat {number}")):
            messages.append({"role": "user", "content": said})
            prompt = _encode(engine, messages)
            (event,) = engine.generate([EngineRequest("bench", prompt, SamplingParams(48, temperature=0))])
            usage = _usage(event.usage)
            reused += (usage.reused_joint if has_draft_kv(method) else usage.reused_target) if before else 0
            possible += _shared(before, prompt)
            before = (prompt + event.token_ids)[:-1]  # the last token's KV was never needed
            messages.append({"role": "assistant", "content": event.text})
    return reused / possible


def _shared(before: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with."""
    same = 0
    for ours, theirs in zip(before, prompt, strict=False):
        if ours != theirs:
            break
        same += 1
    return same


def _encode(engine: Engine, messages: Sequence[Message]) -> tuple[int, ...]:
    tokenizer = engine.parts.tokenizer
    if tokenizer is None:
        raise RuntimeError("modes are measured on text, which needs a tokenizer")
    if tokenizer.has_chat_template:
        return tuple(tokenizer.encode_chat(messages))
    return tuple(tokenizer.encode("\n".join(message["content"] for message in messages) + "\n"))


def _usage(usage: Usage | None) -> Usage:
    if usage is None:
        raise RuntimeError("a finished request has no usage")
    return usage


def _engine(target: Path, mode: Mode) -> Engine:
    return Engine(
        EngineConfig(
            model=target,
            draft=mode.draft,
            method=mode.method,
            num_speculative_tokens=_DRAFTS,
            kv_bytes=_KV_BYTES,
            max_batch=1,
            tree_top_k=_TREE_WIDTH if mode.tree else 1,
            tree_total_tokens=_TREE_TOKENS,
        )
    )
