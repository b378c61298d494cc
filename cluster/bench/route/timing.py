"""How long a simulated worker's steps take: a roofline of one large model with a hidden-state draft.

The defaults are a dense model of 70 B parameters in 16 bits on four A100s of 80 GB, with an EAGLE3 head, computed
from data sheets: matrix work at half of 1.25 PFLOP/s, memory at 80% of 8 TB/s. A token's prefill is 140 GFLOP in the
target and 2 in the draft, attention adds 2.6 MFLOP for each token before it; a decode step reads the weights once
(140 GB) and 320 KiB of KV for each token of context; drafting three tokens adds three passes over the head.

Pure values, in milliseconds. Used by `worker` to run, and by policies that know what their peers publish as a
calibrated model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.handle import Coupling


@dataclass(frozen=True, slots=True)
class StepTimes:
    step_ms: float = 24.0
    """A step's fixed part: weights read once, kernels launched."""
    target_token_ms: float = 0.22
    target_context_ms: float = 4.2e-6
    """For each token computed and each token before it."""
    draft_token_ms: float = 0.0035
    row_ms: float = 0.1
    """For each decoding request."""
    kv_token_ms: float = 5.0e-5
    """For each token of context that decoding requests read."""
    draft_step_ms: float = 3.0
    """Drafting, in a step with speculative rows."""

    def prefill_ms(self, start: int, tokens: int) -> float:
        """Target work for so many tokens of a prompt behind the first `start`."""
        return tokens * (self.target_token_ms + self.target_context_ms * (start + tokens / 2))

    def decode_ms(self, rows: int, speculative: int, context: float) -> float:
        """One step's part for its decoding rows, which read so many tokens of context in all."""
        drafting = self.draft_step_ms if speculative else 0.0
        return rows * self.row_ms + context * self.kv_token_ms + drafting


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One kind of worker. `pool_tokens` are positions in each of the two pools, which one byte budget is split into."""

    times: StepTimes = field(default_factory=StepTimes)
    coupling: Coupling = Coupling.JOINT
    pool_tokens: int = 400_000
    token_budget: int = 4096
    """Tokens that one step takes, decoding rows included."""
    max_running: int = 64
    max_queue: int = 100_000
    """Deep enough that nobody is turned away: every policy serves every request."""
