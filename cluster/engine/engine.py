"""The engine: continuous batching of requests over one target, one optional drafter and the paired KV pools.

`step` is admit -> plan -> copies -> target forward -> sample and verify -> draft -> append and commit -> events.
Which rows run is decided by `cluster.core.admission`, what happens on tensors by `cluster.engine.step`. Invariant:
between two steps no block is reserved, and a request that has ended holds none. If a step raises, its requests fail
and the engine goes on. Owned by one thread: that of `cluster.engine.loop`, outside of tests.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from cluster.core.batch_plan import StepPlan
from cluster.core.ledger import FrontierChanges
from cluster.core.request import FinishReason, Request
from cluster.core.sampling import SamplingParams
from cluster.engine.assembly import assemble
from cluster.engine.audit import PoolAudit, PublishedSequence
from cluster.engine.config import EngineConfig
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.grammar import Compiled
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.output import RequestOutput
from cluster.engine.stats import EngineCounters, EngineStats
from cluster.engine.step import RowOutcome
from cluster.errors import Internal, InvalidRequest, TandemError

_log = logging.getLogger(__name__)
_AUDITED_SEQUENCES = 64


class Engine:
    """Not thread-safe. `add` and `cancel` between steps; what they lead to comes out of the next `step`."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the models and allocates the pools. Raises ModelLoadError or ConfigError."""
        self.config = config
        self.parts = assemble(config)
        self._admission = self.parts.admission
        self._outputs: dict[str, RequestOutput] = {}
        self._ended: list[RequestEvent] = []
        self._counters = EngineCounters()
        self._published: deque[PublishedSequence] = deque(maxlen=_AUDITED_SEQUENCES)

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest, compiled: Compiled | None = None) -> None:
        """Queue a request. Raises InvalidRequest, PromptTooLarge or CapacityExceeded; then nothing is kept of it.

        `compiled` is the request's grammar as `parts.grammars.prepare` made it; without it, this waits for that.
        """
        self._validate(request)
        matcher = self._matcher(request.sampling, compiled)
        # What can't be generated needn't fit into the pools either.
        room = self.parts.max_len - len(request.prompt)
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        queued = Request(
            request.request_id,
            request.prompt,
            sampling,
            priority=request.priority,
            deadline=request.deadline,
            tenant_salt=request.tenant_salt,
            speculate=request.speculate and self.parts.drafter is not None,
            reuse=request.reuse and self.config.enable_reuse,
        )
        self._admission.submit(queued)
        tokenizer = self.parts.tokenizer
        self._outputs[request.request_id] = RequestOutput(
            queued,
            tokenizer.detokenizer(request.prompt) if tokenizer else None,
            frozenset(self.parts.target.eos_ids),
            matcher,
        )

    def _matcher(self, sampling: SamplingParams, compiled: Compiled | None) -> GrammarMatcher | None:
        if sampling.grammar is None:
            return None
        grammars = self.parts.grammars
        return grammars.matcher(compiled or grammars.prepare(sampling.grammar).result(), {*sampling.stop_token_ids})

    def _validate(self, request: EngineRequest) -> None:
        if request.request_id in self._outputs or any(request.request_id == told.request_id for told in self._ended):
            raise InvalidRequest(
                "request_id", request.request_id, "the id of no unfinished request", "choose a new one"
            )
        length, longest, vocabulary = len(request.prompt), self.parts.max_len - 1, self.parts.target.vocab_size
        if not 1 <= length <= longest:
            remedy = "shorten the prompt" if length else "send at least one token"
            raise InvalidRequest("prompt", f"{length} tokens long", f"between 1 and {longest} tokens long", remedy)
        for position, token in enumerate(request.prompt):
            if not 0 <= token < vocabulary:
                limit = f"between 0 and {vocabulary - 1}, the model's vocabulary"
                raise InvalidRequest(f"prompt[{position}]", token, limit, "tokenize with the model's own tokenizer")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens", request.sampling.max_tokens, "at least 1", "ask for at least one token")

    def cancel(self, request_id: str) -> None:
        """End a request now; its last event comes with the next step. Unknown ids are ignored."""
        request = self._admission.cancel(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End every request."""
        for request_id in list(self._outputs):
            self.cancel(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._ended) or self._admission.has_work()

    # ------------------------------------------------------------ stepping

    def step(self) -> list[RequestEvent]:
        """Run one batch and return what happened. Never raises for a fault of a request or of the batch."""
        plan = self._admission.plan(time.monotonic())
        self._counters.preemptions += len(plan.preempted)
        if self.parts.drafter is not None:
            for request in plan.preempted:
                self.parts.drafter.forget(request.request_id)
        for request in plan.expired:
            self._end(request, FinishReason.DEADLINE)
        events = self._run(plan) if plan.rows else []
        ended, self._ended = self._ended, []
        if self.config.audit:
            self._check()
        return events + ended

    def _run(self, plan: StepPlan) -> list[RequestEvent]:
        self._counters.steps += 1
        try:
            outcomes = self.parts.runner.run(plan, self._outputs)
        except Exception:
            self._counters.failed_steps += 1
            error = _internal_error("step failed", [row.request for row in plan.rows])
            for row in plan.rows:
                self._fail(row.request, error)
            return []
        self._counters.computed += plan.num_tokens
        return [event for event in map(self._settle, outcomes) if event is not None]

    def _settle(self, outcome: RowOutcome) -> RequestEvent | None:
        """Commit a row's outcome; the event of the tokens that it yielded."""
        row, taken = outcome.row, outcome.taken
        if outcome.failed:
            self._fail(row.request, self._fault(row.request))
            return None
        tokens = taken.tokens if taken else ()
        self._admission.complete(row, tokens, outcome.draft_computed, outcome.next_drafts)
        if taken is None:
            return None
        self._count(outcome)
        if taken.finish is not None:
            usage = self._close(row.request, taken.finish).usage()
            return RequestEvent(row.request.request_id, tokens, taken.text, taken.logprobs, taken.finish, usage)
        return RequestEvent(row.request.request_id, tokens, taken.text, taken.logprobs)

    def _count(self, outcome: RowOutcome) -> None:
        counters = self._counters
        counters.generated += len(outcome.taken.tokens) if outcome.taken else 0
        if outcome.row.num_drafts:
            counters.draft_steps += 1
            counters.drafted += outcome.row.num_drafts
            counters.accepted += outcome.accepted

    # ------------------------------------------------------------ ending

    def _close(self, request: Request, reason: FinishReason) -> RequestOutput:
        """Take a request out of the engine; it holds nothing afterwards."""
        self._admission.finish(request, reason)
        if self.parts.drafter is not None:
            self.parts.drafter.forget(request.request_id)
        self._counters.finished_requests += 1
        output = self._outputs.pop(request.request_id)
        if self.config.audit and request.reuse:
            self._published.append(PublishedSequence(tuple(output.tokens), request.tenant_salt))
        return output

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request outside of a step's rows; its last event is kept for the end of the step."""
        self._ended.append(self._close(request, reason).last_event(reason))

    def _fault(self, request: Request) -> TandemError:
        """Why a row has no next token."""
        grammar = self._outputs[request.request_id].grammar
        if grammar is not None and grammar.stuck:
            limit = "a form of which each token can be found in some ten milliseconds"
            return InvalidRequest("structured_output", "too intricate", limit, "simplify it")
        return _internal_error("logits are not finite", [request])

    def _fail(self, request: Request, error: TandemError) -> None:
        """End a request by an error. Blocks of its own are cleared: what they hold may not be finite."""
        handle = request.handle
        if handle is not None:
            for pool in handle.pools:
                kv = self.parts.kv[pool]
                kv.scrub(handle.block_table(pool)[handle.held(pool) // kv.block_size :])
        output = self._close(request, FinishReason.ERROR)
        event = RequestEvent(request.request_id, finish=FinishReason.ERROR, usage=output.usage(), error=error)
        self._ended.append(event)

    def fail_all(self) -> list[RequestEvent]:
        """End every request by a defect, after `step` raised; returns their last events."""
        requests = [output.request for output in self._outputs.values()]
        error = _internal_error("planning failed", requests)
        for request in requests:
            self._fail(request, error)
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------ looking from outside

    def stats(self) -> EngineStats:
        """A picture of now."""
        counters = self._counters
        return EngineStats(
            running=self._admission.num_running,
            waiting=self._admission.num_waiting,
            backlog=self._admission.backlog,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            finished_requests=counters.finished_requests,
            computed=counters.computed,
            generated=counters.generated,
            draft_steps=counters.draft_steps,
            drafted=counters.drafted,
            accepted=counters.accepted,
            preemptions=counters.preemptions,
            pools=self.parts.cache.meters(),
        )

    def drain_changes(self) -> FrontierChanges:
        """What was published and evicted since the last call, for the frontier report."""
        return self.parts.cache.changes()

    def snapshot(self) -> FrontierChanges:
        """All that is published."""
        return self.parts.cache.snapshot()

    def audit(self, sequences: Sequence[PublishedSequence] | None = None) -> list[PoolAudit]:
        """Compare published KV with a recomputation; of the latest requests (audit mode), or of the given sequences."""
        self.parts.cache.check()
        return self.parts.auditor.audit(list(self._published) if sequences is None else sequences)

    def _check(self) -> None:
        """Audit mode: invariants after every step, contents when idle. Raises RuntimeError."""
        self.parts.cache.check()
        if self._admission.has_work() or not self._published:
            return
        bad = [result for result in self.audit() if not result.ok]
        self._published.clear()
        if bad:
            raise RuntimeError(f"published KV differs from its recomputation: {bad}")

    def close(self) -> None:
        """End every request, without events, and the threads and processes of the engine."""
        self.cancel_all()
        self.parts.grammars.close()
        self._ended.clear()

    def generate(self, requests: Sequence[EngineRequest]) -> list[RequestEvent]:
        """Run `requests` to their ends, together with all else that is queued; each one's events as one, in order.

        Raises what `add` raises.
        """
        for request in requests:
            self.add(request)
        events = {request.request_id: RequestEvent(request.request_id) for request in requests}
        while any(event.finish is None for event in events.values()):
            for event in self.step():
                if event.request_id in events:
                    events[event.request_id] = events[event.request_id].then(event)
        return list(events.values())


def _internal_error(what: str, requests: Sequence[Request]) -> Internal:
    """Log a defect, with its traceback if one is being handled, under an id that the client is given."""
    error_id = secrets.token_hex(6)
    ids = ",".join(request.request_id for request in requests)
    _log.error(
        "event=engine_fault error_id=%s what=%r requests=%s",
        error_id,
        what,
        ids,
        exc_info=sys.exc_info()[0] is not None,
    )
    return Internal(error_id)
