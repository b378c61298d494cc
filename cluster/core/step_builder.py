"""Builds one step: who runs, with how many tokens, and on whose blocks.

Requests are taken in the order in which the caller offers them. One that finds no room gives up its drafts first, and
then takes the blocks of requests that rank behind it, the last one first; if there is none, it keeps its blocks and
sits out. So the first in rank always runs. Invariant: each row's reservation is open while the row is in the step,
and requests that aren't in the step have none. Used by `Admission.plan`, one builder a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from enum import Enum, auto

from cluster.core.batch_plan import AdmissionLimits, DraftShape, RowPlan, StepPlan
from cluster.core.draft_length import DraftLength
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.handle import CacheHandle, Claim, Coupling
from cluster.core.paired_cache import DRAFT, TARGET, PairedCache
from cluster.core.request import Request, RequestStatus


def rank_of(request: Request) -> tuple[int, int]:
    """Sort key: the lower is served first, and preempted last."""
    return request.rank


class Verdict(Enum):
    """What became of a waiting request: WAITS means that a request of this step computes the very block that would be
    its first, so that it can share it in the next one."""

    ADMITTED = auto()
    WAITS = auto()
    NO_ROOM = auto()


class StepBuilder:
    """`running` are the requests that hold blocks; `suspend` takes a request's blocks away and lets it wait again."""

    def __init__(
        self,
        cache: PairedCache,
        limits: AdmissionLimits,
        shape: DraftShape,
        lengths: DraftLength,
        running: Iterable[Request],
        suspend: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._shape = shape
        self._lengths = lengths
        self._suspend = suspend
        self._holders = sorted(running, key=rank_of)
        self._rows: dict[str, RowPlan] = {}
        self._computing: dict[str, bytes] = {}
        self.preempted: list[Request] = []
        """Requests that lost their blocks in this step."""
        self.budget = limits.token_budget
        """Target tokens that the step can still take."""

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks now, best rank first."""
        return tuple(self._holders)

    def advance(self, request: Request, max_drafts: int) -> None:
        """Schedules a request that holds blocks, with up to so many of its drafts, if budget and pools allow.

        One that lost its blocks earlier in this step is left alone."""
        if request.status is RequestStatus.RUNNING:
            self._schedule(request, _handle_of(request), request.drafts.first(max_drafts), None)

    def admit(self, request: Request, handle: CacheHandle, skip_gap: bool) -> Verdict:
        """Claims blocks for a waiting request and schedules its first chunk. If it isn't admitted, it holds nothing.

        `skip_gap` is that of `PairedCache.claim`."""
        while len(self._holders) >= self._limits.max_batch:
            if not self._preempt_for(request, newcomer=True):
                return Verdict.NO_ROOM
        claim = self._cache.claim(handle, skip_gap)
        block = _next_block(handle)
        waits = block is not None and block in self._computing.values()
        if waits or not self._schedule(request, handle, NO_DRAFTS, claim):
            self._cache.suspend(handle)
            return Verdict.WAITS if waits else Verdict.NO_ROOM
        insort(self._holders, request, key=rank_of)
        return Verdict.ADMITTED

    def plan(self, expired: Iterable[Request]) -> StepPlan:
        """The finished step."""
        return StepPlan(tuple(self._rows.values()), tuple(self.preempted), tuple(expired))

    # ------------------------------------------------------------ inside

    def _schedule(self, request: Request, handle: CacheHandle, drafts: Drafts, claim: Claim | None) -> bool:
        speculates = request.speculate and (self._shape.span is None or DRAFT in handle.pools)
        most = self._shape.max_draft_tokens if speculates else 0
        length = self._lengths.choose(request.acceptance, len(self._holders), most)
        row = self._row(request, handle, drafts, length, claim)
        while row is not None and not self._reserve(handle, row):
            if row.num_drafts or row.next_drafts:
                row = self._row(request, handle, NO_DRAFTS, 0, claim)
            elif not self._preempt_for(request, newcomer=claim is not None):
                return False
        if row is None:
            return False
        self._rows[request.request_id] = row
        self.budget -= len(row.tokens)
        block = _next_block(handle)
        if block is not None and row.target_end >= handle.held(TARGET) + self._block_size:
            self._computing[request.request_id] = block
        return True

    def _row(
        self, request: Request, handle: CacheHandle, drafts: Drafts, next_drafts: int, claim: Claim | None
    ) -> RowPlan | None:
        """The request's row within budget, chunk and length limits; None if the budget is used up."""
        known = request.num_known
        draft_start = handle.cursor(DRAFT) if DRAFT in handle.pools else None
        start = handle.cursor(TARGET)
        joint = self._shape.coupling is Coupling.JOINT
        chunk = self._chunk(known)
        taken = min(known - start, chunk, self.budget)
        if taken <= 0:
            return None
        final = start + taken == known
        room = min(request.sampling.max_tokens - len(request.output), self._limits.max_len - known)
        drafts = drafts.within(room - 1).first(self.budget - taken) if final else NO_DRAFTS
        return RowPlan(
            request=request,
            shape=self._shape,
            known=known,
            start=start,
            tokens=request.known(start, start + taken) + drafts.tokens,
            num_known=taken,
            drafts=drafts,
            draft_start=draft_start,
            draft_limit=start + taken + drafts.depth if joint else (draft_start or 0) + chunk,
            next_drafts=self._shape.drafts_for(known + 1, min(next_drafts, room - 2)) if final else 0,
            room=room,
            claim=claim,
        )

    def _chunk(self, known: int) -> int:
        """Most tokens of one request in a step. At least what a decode step of the draft needs to keep up."""
        shape = self._shape
        if self._limits.chunk is None:
            return known + shape.max_draft_tokens + 1
        return max(self._limits.chunk, shape.max_draft_tokens + 1, shape.span or 0)

    def _reserve(self, handle: CacheHandle, row: RowPlan) -> bool:
        target = max(0, row.target_end - handle.cursor(TARGET))
        draft = 0 if row.draft_start is None else row.draft_width - row.draft_start
        return self._cache.reserve(handle, target, draft) is not None

    def _preempt_for(self, request: Request, newcomer: bool) -> bool:
        """Suspends the request that ranks last, if it ranks behind this one; for a newcomer, only if priorities
        differ."""
        victim = self._holders[-1] if self._holders else None
        if victim is None or victim.rank <= request.rank or (newcomer and victim.priority <= request.priority):
            return False
        self._holders.pop()
        row = self._rows.pop(victim.request_id, None)
        if row is not None:
            self.budget += len(row.tokens)
        self._computing.pop(victim.request_id, None)
        self._suspend(victim)
        self.preempted.append(victim)
        return True

    @property
    def _block_size(self) -> int:
        return self._cache.pools[TARGET].spec.block_size


def _handle_of(request: Request) -> CacheHandle:
    if request.handle is None:
        raise RuntimeError(f"request {request.request_id} runs without a cache handle")
    return request.handle


def _next_block(handle: CacheHandle) -> bytes | None:
    """Key of the first full block of known tokens that isn't published; None if there is none, or it isn't to be
    shared."""
    holding = handle.holdings[TARGET]
    if not holding.reuse or (holding.published + 1) * holding.stream.block_size > holding.stream.n_units:
        return None
    return holding.stream.block_key(holding.published)
