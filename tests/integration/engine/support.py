"""Shared by the engine's integration tests: tiny engines, prompts, and transformers' `generate` as the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.core.draft_gap import DraftGap
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.tokenizer import Tokenizer
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.tree import TreeShape
from tests.fixtures.prompts import TINY_DRAFTS, TINY_TARGET, mixed_prompts, shared_system_prompts

ROOMY = 4 << 20
METHODS = tuple(SpeculationMethod)
NEAR_TIE = 1e-4
"""Where the two best logits lie this close, rounding may swap them."""


def make_engine(
    method: str = "none",
    *,
    reuse: bool = True,
    chunk: int | None = 64,
    kv_bytes: int = ROOMY,
    block_size: int = 16,
    draft_block_size: int | None = None,
    max_batch: int = 8,
    token_budget: int = 512,
    audit: bool = False,
    max_len: int | None = None,
    max_queue: int = 64,
    draft: Path | None = None,
    adaptive_length: bool = False,
    cached_requests: int = 100,
    draft_gap: str = "clip",
    tree: TreeShape | None = None,
) -> Engine:
    """An engine over the tiny models, chains of 3 or trees of that depth."""
    torch.set_num_threads(1)
    return Engine(
        EngineConfig(
            model=TINY_TARGET,
            draft=draft or TINY_DRAFTS.get(method),
            method=SpeculationMethod(method),
            num_speculative_tokens=3,
            tree_top_k=tree.top_k if tree else 1,
            tree_total_tokens=tree.total if tree else 60,
            adaptive_length=adaptive_length,
            suffix_max_cached_requests=cached_requests,
            draft_gap=DraftGap(draft_gap),
            block_size=block_size,
            draft_block_size=draft_block_size,
            kv_bytes=kv_bytes,
            max_batch=max_batch,
            max_queue=max_queue,
            token_budget=token_budget,
            chunk=chunk,
            max_len=max_len,
            enable_reuse=reuse,
            audit=audit,
        )
    )


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_TARGET)


def encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text))


@cache
def eight_prompts() -> tuple[tuple[int, ...], ...]:
    """Eight prompts of 30 to 150 tokens; four share a system prompt, so that chunks, forks and reuse all occur."""
    shared = shared_system_prompts(4, seed=11, size=8)
    return tuple(encode(prompt.text) for prompt in [*shared, *mixed_prompts(4, seed=5, size=6)])


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)  # type: ignore[arg-type]


def requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, name: str = "r", **options: object
) -> list[EngineRequest]:
    return [EngineRequest(f"{name}{i}", prompt, sampling, **options) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]


def run_all(engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[RequestEvent]:
    """All prompts in one batch."""
    return engine.generate(requests(prompts, sampling))


@dataclass(frozen=True)
class Reference:
    """What transformers' own `generate` yields: tokens, and how far the second best logit lay behind each."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@cache
def reference_model() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    return model


@cache
def reference(prompt: tuple[int, ...], max_tokens: int) -> Reference:
    """Greedy, one prompt alone, never stopping early."""
    torch.set_num_threads(1)
    model = reference_model()
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).float().topk(2).values
    tokens = tuple(output.sequences[0, len(prompt) :].tolist())
    return Reference(tokens, tuple((best[:, 0] - best[:, 1]).tolist()))


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one differs too)."""
    for i in range(max(len(got), len(want))):
        if i >= len(got) or i >= len(want) or got[i] != want[i]:
            return i
    return None
