"""What an engine is built from. Owns no parsing: the pydantic configuration converts to this. Read by `Engine`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.core.draft_gap import DraftGap
from cluster.speculation.lookahead import SpeculationMethod


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens unless the name says otherwise.

    `kv_bytes` is the one budget that the target's and the draft's pool share. `chunk` bounds the prompt tokens a
    request computes in one step (None: only `token_budget` bounds them). `max_len` bounds prompt plus output; None
    means the model's own limit. `num_speculative_tokens` is the length of a chain of drafts, or the depth of a tree
    where `tree_top_k` is above 1; with `adaptive_length` it is the most. `allow_pickle` lets a draft's pickled weights
    be read, by torch's unpickler of tensors.
    """

    model: Path
    draft: Path | None = None
    method: SpeculationMethod = SpeculationMethod.NONE
    num_speculative_tokens: int = 3
    dtype: str = "auto"
    block_size: int = 16
    draft_block_size: int | None = None
    kv_bytes: int = 1 << 30
    max_batch: int = 32
    max_queue: int = 256
    token_budget: int = 2048
    chunk: int | None = 512
    max_len: int | None = None
    enable_reuse: bool = True
    audit: bool = False
    ngram_min: int = 2
    ngram_max: int = 4
    suffix_max_tree_depth: int = 24
    suffix_max_cached_requests: int = 10_000
    suffix_max_spec_factor: float = 1.0
    suffix_min_token_prob: float = 0.1
    adaptive_length: bool = False
    draft_gap: DraftGap = DraftGap.CLIP
    tree_top_k: int = 1
    tree_total_tokens: int = 60
    allow_pickle: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        # A plain string, as configurations hold it, is accepted too.
        object.__setattr__(self, "method", SpeculationMethod(self.method))
