"""What a step consists of: which tokens of which requests run, and how much each drafter may do.

Values only. `Admission.plan` makes a `StepPlan`, the engine carries it out and hands every row back to
`Admission.complete`. Invariant: all that a row needs of any pool is reserved when the plan is handed out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.drafts import Drafts
from cluster.core.handle import Claim, Coupling
from cluster.core.holding import BlockCopy
from cluster.core.request import Request


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What planning must know of a drafter.

    `span`: its KV's lookahead in tokens; None for a drafter without KV. `max_draft_tokens`: K, the length of the
    longest chain, or the depth of the deepest tree. `max_positions`: tokens that the draft model can attend to, None if
    unlimited. `scratch`: draft slots beyond those with real inputs that a drafting pass writes; None for one fewer than
    drafts, as a chain needs."""

    coupling: Coupling
    span: int | None
    max_draft_tokens: int
    max_positions: int | None = None
    scratch: int | None = None

    def real_slots(self, known: int) -> int:
        """Draft slots that `known` tokens determine. A draft that reads the target's states must do without those of
        the newest token, which the target has yet to compute."""
        unread = 1 if self.coupling is Coupling.JOINT else 0
        return max(0, known - max(self.span or 0, unread))

    def scratch_for(self, drafts: int) -> int:
        """Draft slots that proposing so many drafts may write beyond those with real inputs."""
        if drafts <= 0:
            return 0
        return drafts - 1 if self.scratch is None else self.scratch

    def drafts_for(self, known: int, wanted: int) -> int:
        """How deep of the wanted depth drafts can follow `known` tokens: at most K, not past the draft's last
        position."""
        room = wanted if self.max_positions is None else self.max_positions - known
        return max(0, min(wanted, self.max_draft_tokens, room))


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_batch` rows and `token_budget` target tokens (drafts included) a step; `chunk` is the most prompt tokens
    of one request in a step, None for no such limit; `max_queue` requests may wait; `max_len` tokens in prompt and
    output.

    `aging`: a request counts as one priority level better for every `aging` steps that it came earlier than another.
    """

    max_batch: int
    token_budget: int
    chunk: int | None
    max_queue: int
    max_len: int
    aging: int = 1000

    def __post_init__(self) -> None:
        for name in ("max_batch", "token_budget", "chunk", "max_queue", "max_len", "aging"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        if self.token_budget < self.max_batch:
            raise ValueError(f"token_budget is {self.token_budget}, but must be at least max_batch, {self.max_batch}")


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's share of a step. The target computes slots [start, start + len(tokens)).

    known: tokens of the request that were known when the step was planned.
    tokens: the `num_known` known tokens from `start` on, then the tokens of `drafts`, to be verified. Each has a slot
    of its own, in this order; the position of a draft is given by its depth.
    draft_start: first draft slot whose KV isn't computed; None if the request uses no draft pool.
    draft_limit: draft slots with real inputs end here at the latest, whatever is accepted.
    next_drafts: how deep to draft after this step at most; slots for that are reserved.
    room: tokens that the request may still get, from `known` on.
    claim: what was claimed for it in this very plan; None if it was running before.
    """

    request: Request
    shape: DraftShape
    known: int
    start: int
    tokens: tuple[int, ...]
    num_known: int
    drafts: Drafts
    draft_start: int | None
    draft_limit: int
    next_drafts: int
    room: int
    claim: Claim | None

    @property
    def num_drafts(self) -> int:
        """Drafts that the row verifies."""
        return len(self.drafts)

    @property
    def needs_logits(self) -> bool:
        """Whether the row reaches the last known token, and so yields one new token more than drafts are accepted.
        Otherwise it is a chunk of a prompt (or of prompt and output, after a preemption) and yields none."""
        return self.start + self.num_known == self.known

    def draft_end(self, num_new: int) -> int:
        """One past the last draft slot to write with real inputs, when this step yields `num_new` tokens."""
        if self.draft_start is None:
            return 0
        return max(self.draft_start, min(self.draft_limit, self.shape.real_slots(self.known + num_new)))

    def drafts_after(self, num_new: int) -> int:
        """How deep to draft, when this step yields `num_new` tokens: no further than could be used, and not at all
        while the draft has yet to catch up."""
        if not self.needs_logits:
            return 0
        known = self.known + num_new
        if self.draft_start is not None and self.draft_end(num_new) != self.shape.real_slots(known):
            return 0
        # Whatever is drafted, the target adds one more token of its own.
        return self.shape.drafts_for(known, min(self.next_drafts, self.room - num_new - 1))

    @property
    def target_end(self) -> int:
        """One past the last slot that the target writes."""
        return self.start + len(self.tokens)

    @property
    def draft_width(self) -> int:
        """One past the last draft slot that may be written, scratch slots included."""
        new = self.drafts.depth + 1 if self.needs_logits else 0
        return self.draft_end(new) + self.shape.scratch_for(self.next_drafts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Carry out `copies` in order, then run `rows` together.

    `preempted` requests lost their blocks and wait again; `expired` ones ended with FinishReason.DEADLINE.
    """

    rows: tuple[RowPlan, ...]
    preempted: tuple[Request, ...] = ()
    expired: tuple[Request, ...] = ()

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """Copy-on-write of the requests that were admitted, in the order of their claims."""
        return tuple(copy for row in self.rows if row.claim is not None for copy in row.claim.copies)

    @property
    def num_tokens(self) -> int:
        """Target tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)
