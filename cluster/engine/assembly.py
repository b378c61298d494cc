"""Puts an engine's parts together: models, pools cut from one byte budget, planner, step runner.

Invariant: the tensors of both pools together take at most `kv_bytes`. Called once, by `Engine`; every failure is an
error for the user.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.admission import Admission
from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.draft_costs import MeasuredCosts
from cluster.core.draft_gap import DraftGap, FixedGaps, PredictedGaps
from cluster.core.draft_length import AdaptiveDraftLength
from cluster.core.paired_cache import Coupling, PairedCache, PoolSpec, split_budget
from cluster.engine.audit import KvAuditor
from cluster.engine.config import EngineConfig
from cluster.engine.grammar import GrammarCompiler
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.runner import PagedModel
from cluster.engine.sampler import Sampler
from cluster.engine.step import StepRunner
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import ConfigError
from cluster.speculation.draft_folder import draft_fingerprint
from cluster.speculation.factory import load_drafter
from cluster.speculation.protocol import Drafter


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one engine. `tokenizer` is None if the model's folder has none: then there is no text."""

    target: LoadedModel
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler
    drafter: Drafter | None
    cache: PairedCache
    admission: Admission
    runner: StepRunner
    auditor: KvAuditor
    kv: dict[str, KvTensors]
    max_len: int


def assemble(config: EngineConfig) -> Assembly:
    """Load everything `config` names. Raises ModelLoadError or ConfigError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(config.model, config.dtype, device)
    tokenizer = Tokenizer.load(config.model) if (config.model / "tokenizer.json").is_file() else None
    vocabulary = min(target.vocab_size, tokenizer.vocab_size) if tokenizer else target.vocab_size
    sampler = Sampler(vocabulary, target.eos_ids)
    drafter = load_drafter(config, target, sampler)
    kv = _allocate_pools(config, target, drafter)
    cache = _pair(config, target, drafter, kv)
    limits = _limits(config, target, kv["target"])
    shape = drafter.shape if drafter else DraftShape(Coupling.NONE, None, 0)
    costs = MeasuredCosts()
    return Assembly(
        target=target,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, vocabulary, target.eos_ids),
        drafter=drafter,
        cache=cache,
        admission=Admission(
            cache,
            limits,
            shape,
            AdaptiveDraftLength(costs) if config.adaptive_length else None,
            PredictedGaps(costs) if config.draft_gap is DraftGap.AUTO else FixedGaps(config.draft_gap is DraftGap.SKIP),
        ),
        runner=StepRunner(PagedModel(target, kv["target"]), sampler, drafter, kv.get("draft"), costs),
        auditor=KvAuditor(target, drafter, cache, kv),
        kv=kv,
        max_len=limits.max_len,
    )


def _allocate_pools(config: EngineConfig, target: LoadedModel, drafter: Drafter | None) -> dict[str, KvTensors]:
    """The tensors of each pool, out of the one byte budget; attaches the draft's to the drafter."""
    layouts: dict[str, tuple[KvLayout, int]] = {"target": (target.layout, config.block_size)}
    if drafter is not None and drafter.kv_layout is not None:
        layouts["draft"] = (drafter.kv_layout, config.draft_block_size or config.block_size)
    widths = [layout.bytes_per_token for layout, _ in layouts.values()]
    try:
        blocks = split_budget(config.kv_bytes, widths, [size for _, size in layouts.values()])
    except ValueError as error:
        raise ConfigError(f"{error}: give the engine more KV memory or smaller blocks.") from None
    kv = {
        name: KvTensors(layout, count, size, target.device)
        for (name, (layout, size)), count in zip(layouts.items(), blocks, strict=True)
    }
    if drafter is not None and "draft" in kv:
        drafter.attach(kv["draft"])
    return kv


def _pair(config: EngineConfig, target: LoadedModel, drafter: Drafter | None, kv: dict[str, KvTensors]) -> PairedCache:
    target_spec = _spec("target", kv["target"], target.fingerprint, span=0)
    if drafter is None or "draft" not in kv:
        return PairedCache(target_spec)
    identity = draft_fingerprint(config.draft or config.model, config.allow_pickle)
    draft_spec = _spec("draft", kv["draft"], identity, drafter.shape.span or 0)
    return PairedCache(target_spec, draft_spec, drafter.shape.coupling)


def _spec(name: str, kv: KvTensors, model: str, span: int) -> PoolSpec:
    dtype = str(kv.layout.dtype).removeprefix("torch.")
    return PoolSpec(name, kv.block_size, kv.num_blocks, span, model, dtype, kv.layout.window)


def _limits(config: EngineConfig, target: LoadedModel, kv: KvTensors) -> AdmissionLimits:
    longest = target.max_positions
    if config.max_len is not None and longest is not None and config.max_len > longest:
        raise ConfigError(f"max_len is {config.max_len}, but must be at most {longest}, the model's limit: lower it.")
    try:
        return AdmissionLimits(
            max_batch=config.max_batch,
            token_budget=config.token_budget,
            chunk=config.chunk,
            max_queue=config.max_queue,
            max_len=config.max_len or longest or kv.num_blocks * kv.block_size,
        )
    except ValueError as error:
        raise ConfigError(f"{error}: correct the configuration.") from None
