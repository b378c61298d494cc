"""Who waits, who runs, and what runs next: from submission to the end of a request.

Requests are served by rank: order of arrival, where each level of priority counts as `aging` steps. A request can be
overtaken only by those that arrive within that many steps after it, so none starves: the first in rank always runs (see
`StepBuilder`), ends, and makes place.

Invariants: a waiting or finished request holds no block; a request that is accepted fits into the pools alone, so that
preempting the others always lets it go on; every path back from a failed step leaves counters and caches as they were.
Called by the engine, from one thread:

    plan = admission.plan(now)  ->  run copies and rows  ->  admission.complete(row, ...) for each row
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from cluster.core.batch_plan import AdmissionLimits, DraftShape, RowPlan, StepPlan
from cluster.core.draft_gap import FixedGaps, GapPolicy
from cluster.core.draft_length import MEMORY, DraftLength, FixedDraftLength
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.handle import Coupling
from cluster.core.paired_cache import DRAFT, TARGET, CacheHandle, PairedCache
from cluster.core.request import FinishReason, Request, RequestStatus
from cluster.core.step_builder import StepBuilder, Verdict, rank_of
from cluster.errors import CapacityExceeded, InvalidRequest, PromptTooLarge


class Admission:
    """The queue of one worker, over one cache. `shape` says what its drafter needs, `lengths` how much it drafts, and
    `gaps` whether requests start behind a hole in the draft's KV."""

    def __init__(
        self,
        cache: PairedCache,
        limits: AdmissionLimits,
        shape: DraftShape,
        lengths: DraftLength | None = None,
        gaps: GapPolicy | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.shape = shape
        self.lengths: DraftLength = FixedDraftLength() if lengths is None else lengths
        self.gaps: GapPolicy = FixedGaps() if gaps is None else gaps
        self._waiting: list[Request] = []
        self._running: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrivals = 0
        self._steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks, those that were preempted included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    @property
    def backlog(self) -> int:
        """Known tokens that the target has yet to compute before its requests decode. Reuse, still unknown for those
        that wait, will lower it."""
        return sum(max(0, request.num_known - 1 - _cursor(request)) for request in self._requests.values())

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    # ------------------------------------------------------------ coming and going

    def submit(self, request: Request) -> None:
        """Queues a request. Raises, and keeps nothing:

        CapacityExceeded if `max_queue` requests wait already; PromptTooLarge if it could never fit into the target
        pool, even alone; InvalidRequest for an id that is in use, an empty prompt, or tokens that can't be packed.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(
                "request_id", request.request_id, "the id of no unfinished request", "choose a new one"
            )
        if not 0 < len(request.prompt) < self.limits.max_len:
            limit = f"from 1 to {self.limits.max_len - 1} tokens long"
            raise InvalidRequest("prompt", f"{len(request.prompt)} tokens long", limit, "send a prompt of such length")
        if len(self._waiting) >= self.limits.max_queue:
            raise CapacityExceeded(
                f"{len(self._waiting)} requests wait, the limit is {self.limits.max_queue}: retry later."
            )
        self._check_fits(request)
        request.handle = self._open(request)
        self._arrivals += 1
        request.arrival = self._arrivals
        request.rank = (self._steps + request.priority * self.limits.aging, self._arrivals)
        request.status = RequestStatus.WAITING
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=rank_of)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.arrival, request))

    def cancel(self, request_id: str) -> Request | None:
        """Ends a request at the client's wish; None if it isn't here (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.CANCELLED)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request and gives its blocks back, published ones to the cache. Idempotent."""
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        self._running.pop(request.request_id, None)
        if request.status is RequestStatus.WAITING:
            del self._waiting[bisect_left(self._waiting, request.rank, key=rank_of)]
        request.status, request.finish, request.drafts = RequestStatus.FINISHED, reason, NO_DRAFTS
        if request.handle is not None:
            # After an error nobody vouches for what was written last.
            self.cache.free(request.handle, publish_tail=reason is not FinishReason.ERROR)

    def _open(self, request: Request) -> CacheHandle:
        draft = self.cache.pools.get(DRAFT)
        slots = self.shape.real_slots(self._longest(request))
        step = slots if self.limits.chunk is None else max(self.limits.chunk, self.limits.token_budget)
        fits = draft is not None and draft.spec.most_blocks(slots, step) <= draft.spec.num_blocks
        try:
            return self.cache.open(
                request.request_id,
                request.prompt,
                tenant_salt=request.tenant_salt,
                lora=request.lora,
                use_draft=request.speculate and fits,
                reuse=request.reuse,
            )
        except ValueError as error:
            raise InvalidRequest(
                "prompt", str(error), "token ids of the model's vocabulary", "tokenize it anew"
            ) from None

    def _check_fits(self, request: Request) -> None:
        spec = self.cache.pools[TARGET].spec
        # The last token that is generated is never computed.
        needed = spec.most_blocks(self._longest(request) - 1, self.limits.token_budget)
        if needed > spec.num_blocks:
            largest = max(0, spec.num_blocks * spec.block_size - request.sampling.max_tokens + 1)
            raise PromptTooLarge(needed, spec.num_blocks, largest)

    def _longest(self, request: Request) -> int:
        """Tokens of prompt and output that the request may come to."""
        return min(len(request.prompt) + request.sampling.max_tokens, self.limits.max_len)

    # ------------------------------------------------------------ steps

    def plan(self, now: float) -> StepPlan:
        """The next step, with all of its blocks reserved. Decoding requests go first, then prompts under way, then
        new ones.

        Every row must be handed to `complete`, or the whole plan to `revert`, before the next call.
        """
        self._steps += 1
        expired = self._expire(now)
        step = StepBuilder(self.cache, self.limits, self.shape, self.lengths, self._running.values(), self._preempt)
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in step.running:
            (decoding if _is_decoding(request) else prefilling).append(request)
        spare = self.limits.token_budget - len(decoding)
        for request in decoding:
            drafts = min(spare, len(request.drafts))
            spare -= drafts
            step.advance(request, drafts)
        for request in prefilling:
            step.advance(request, 0)
        self._admit(step)
        return step.plan(expired)

    def _expire(self, now: float) -> list[Request]:
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, FinishReason.DEADLINE)
                expired.append(request)
        return expired

    def _admit(self, step: StepBuilder) -> None:
        at = 0
        while at < len(self._waiting) and step.budget > 0:
            request = self._waiting[at]
            if request.handle is None or request in step.preempted:
                return
            match step.admit(request, request.handle, self._skips_gap(request, request.handle)):
                case Verdict.NO_ROOM:
                    return  # the next in rank must not take the room that this one waits for
                case Verdict.WAITS:
                    at += 1
                case Verdict.ADMITTED:
                    del self._waiting[at]
                    request.status = RequestStatus.RUNNING
                    self._running[request.request_id] = request

    def _skips_gap(self, request: Request, handle: CacheHandle) -> bool:
        found = self.cache.probe(handle)
        if self.shape.coupling is not Coupling.JOINT or found.draft is None or found.draft >= found.target:
            return False
        return self.gaps.skips(found.target - found.draft, request.sampling.max_tokens - len(request.output))

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._back_to_queue(request)

    def _back_to_queue(self, request: Request) -> None:
        if request.handle is not None:
            self.cache.suspend(request.handle)
        request.drafts = NO_DRAFTS
        request.status = RequestStatus.WAITING
        self._running.pop(request.request_id, None)
        insort(self._waiting, request, key=rank_of)

    def complete(
        self, row: RowPlan, new_tokens: Sequence[int], draft_computed: int = 0, next_drafts: Drafts = NO_DRAFTS
    ) -> None:
        """The row ran. `new_tokens` are the accepted drafts and the token after them (none for a chunk of a prompt);
        cut where the request ends. `draft_computed` counts draft slots from `row.draft_start` on that now hold KV of
        real inputs.

        Ignored if the request has ended meanwhile.
        """
        request, handle = row.request, row.request.handle
        if request.status is not RequestStatus.RUNNING or handle is None:
            return
        if row.claim is not None and request.first_frontier is None:
            request.first_frontier = row.claim.frontier
        if new_tokens:
            request.acceptance.observe(row.drafts.depth, len(new_tokens) - 1, MEMORY)
        if row.num_drafts:
            self.gaps.observe(handle.has_hole, len(new_tokens) - 1)
        self.cache.append(handle, new_tokens)
        request.output += new_tokens
        request.drafts = next_drafts
        reached = row.start + row.num_known + max(0, len(new_tokens) - 1)
        self.cache.commit(handle, max(0, reached - handle.cursor(TARGET)), draft_computed)

    def revert(self, plan: StepPlan) -> None:
        """The step was not run: gives back what it reserved. Requests that it admitted wait again."""
        for row in plan.rows:
            request, handle = row.request, row.request.handle
            if request.status is not RequestStatus.RUNNING or handle is None:
                continue
            if row.claim is not None:
                self._back_to_queue(request)
            elif handle.reservation is not None:
                self.cache.revert(handle.reservation)


def _is_decoding(request: Request) -> bool:
    """Whether all but the last known token are computed."""
    return request.handle is not None and _cursor(request) >= request.num_known - 1


def _cursor(request: Request) -> int:
    return 0 if request.handle is None else request.handle.cursor(TARGET)
