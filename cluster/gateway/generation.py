"""One request from validated tokens to the last of its answer, whichever protocol carries it.

Owns placing and retrying. Invariant: a request is answered by one worker's stream alone: a worker that fails before the
first token is passed over once, and after that token the request ends as `Unavailable`. Every request that passes the
validator ends with one line in the log. Called by `cluster.gateway.service`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.core.frontier import Frontier
from cluster.core.sampling import SamplingParams
from cluster.errors import CapacityExceeded, StaleEpoch, TandemError, Unavailable
from cluster.gateway.accuracy import RoutingAccuracy
from cluster.gateway.active import ActiveRequest, ActiveRequests
from cluster.gateway.auth import Tenants
from cluster.gateway.dispatcher import Dispatcher
from cluster.gateway.prompts import encode, routing_keys
from cluster.gateway.relay import Relay, cancelled_before_start
from cluster.gateway.request import RequestFields
from cluster.gateway.served import ServedModel
from cluster.gateway.validator import Validator
from cluster.gateway.worker_client import WorkerClients
from cluster.observe.logging import event
from cluster.routing.types import DispatchQuery, Placement
from cluster.rpc import convert
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc._generated.tandem.v1 import tandem_pb2

ATTEMPTS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that passed the validator, with what placing and running it need."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    worker_id: str
    tenant: str
    tenant_salt: bytes
    speculate: bool
    reuse: bool
    keys: Sequence[bytes]
    arrived: float
    deadline: float | None
    """Both in seconds of this process's monotonic clock."""


class Generation:
    """Runs requests on the cluster. Belongs to one asyncio loop."""

    def __init__(self, served: ServedModel, dispatcher: Dispatcher, tenants: Tenants) -> None:
        self._served, self._dispatcher, self._tenants = served, dispatcher, tenants
        self._validator = Validator(served.card, tuple(pool for pool in served.pools if pool.name == "target"))
        self._workers = WorkerClients()
        self.active = ActiveRequests()
        self.accuracy = RoutingAccuracy()

    async def run(
        self, fields: RequestFields, tenant: str, timeout_s: float | None
    ) -> AsyncGenerator[tandem_pb2.GenerateResponse, None]:
        """Deltas, then one completion. Raises a TandemError at the first thing that is wrong."""
        arrived = time.monotonic()
        self._validator.check(fields)
        request_id = fields.request_id or f"gen-{secrets.token_hex(8)}"
        with self.active.running(tenant, request_id) as active:
            outcome = "aborted"
            try:
                job = await self._prepare(replace(fields, request_id=request_id), tenant, arrived, timeout_s)
                async with aclosing(self._relay(job, active)) as responses:
                    async for response in responses:
                        if response.HasField("completion"):
                            outcome = tandem_pb2.FinishReason.Name(response.completion.finish_reason)
                        yield response
            except TandemError as error:
                outcome = type(error).__name__
                raise
            finally:
                seconds = time.monotonic() - arrived
                _log.info(event("request_end", request_id=request_id, outcome=outcome, seconds=seconds))

    async def close(self) -> None:
        """Ends all streams from workers."""
        await self._workers.close()

    async def _prepare(self, fields: RequestFields, tenant: str, arrived: float, timeout_s: float | None) -> Job:
        salt = self._tenants.salt_of(tenant)
        card, tokenizer = self._served.card, self._served.tokenizer
        if fields.prompt is None:
            raise TypeError("the validator lets no request without a prompt pass")
        # Off the loop: a long prompt takes tens of milliseconds, and other streams must go on.
        prompt = await asyncio.to_thread(encode, tokenizer, fields.prompt)
        sampling = self._validator.admit(fields, prompt)
        if sampling.seed is None:
            # Drawn here, not by a worker, so that another worker could go on with the same tokens.
            sampling = replace(sampling, seed=secrets.randbits(63))
        return Job(
            request_id=fields.request_id,
            prompt=prompt,
            sampling=sampling,
            priority=fields.priority or 0,
            worker_id=fields.worker_id,
            tenant=tenant,
            tenant_salt=salt,
            speculate=fields.speculate is not False,
            reuse=fields.reuse is not False,
            keys=await asyncio.to_thread(routing_keys, card, prompt, salt),
            arrived=arrived,
            deadline=None if timeout_s is None else arrived + timeout_s,
        )

    async def _relay(self, job: Job, active: ActiveRequest) -> AsyncGenerator[tandem_pb2.GenerateResponse, None]:
        excluded: frozenset[str] = frozenset()
        for attempt in range(ATTEMPTS):
            if active.cancelled:
                yield cancelled_before_start(job.request_id, len(job.prompt), job.arrived)
                return
            # Unique in the whole cluster, whatever ids clients choose and however often this one is tried.
            worker_request_id = f"{job.request_id}-{secrets.token_hex(4)}"
            placement = await self._place(job, worker_request_id, excluded)
            relay = Relay(job.request_id, placement.worker_id, job.arrived)
            try:
                async with aclosing(self._stream(job, placement, worker_request_id, active, relay)) as messages:
                    async for message in messages:
                        if message.HasField("completion"):
                            self._compare(job, placement.expected, message.completion.reuse)
                        for response in relay.responses(message):
                            yield response
                return
            except (Unavailable, StaleEpoch, CapacityExceeded) as error:
                if isinstance(error, Unavailable):
                    await self._dispatcher.suspect(placement.worker_id, placement.epoch)
                if relay.position:
                    raise _lost(relay.position) from error
                if attempt + 1 == ATTEMPTS:
                    raise
                excluded |= {placement.worker_id}
                _log.warning(event("request_retry", request_id=job.request_id, worker=placement.worker_id))

    def _compare(self, job: Job, expected: Frontier, reuse: tandem_pb2.Reuse) -> None:
        """Notes how far the placement was off."""
        found = Frontier(reuse.target_tokens, reuse.draft_tokens, reuse.joint_tokens)
        self.accuracy = self.accuracy.with_request(expected, found, self._served.card.block_size)
        figures = {"route_predicted_minus_actual_tokens": expected.joint - found.joint}
        _log.info(event("request_reuse", request_id=job.request_id, **figures))

    async def _place(self, job: Job, worker_request_id: str, excluded: frozenset[str]) -> Placement:
        query = DispatchQuery(
            request_id=worker_request_id,
            model=self._served.card.name,
            keys=job.keys if job.reuse else (),
            n_tokens=len(job.prompt),
            max_tokens=job.sampling.max_tokens,
            block_size=self._served.card.block_size,
            speculate=job.speculate,
            reuse=job.reuse,
            exclude=excluded,
            worker_id=job.worker_id,
            tenant=job.tenant,
        )
        answer = await self._dispatcher.dispatch(query)
        if isinstance(answer, Placement):
            return answer
        if answer.saturated:
            raise CapacityExceeded(answer.reason, answer.retry_after_s)
        raise Unavailable(answer.reason)

    async def _stream(
        self, job: Job, placement: Placement, worker_request_id: str, active: ActiveRequest, relay: Relay
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """The worker's messages but the first, by which it says that it has the request."""
        request = worker_pb2.GenerateRequest(
            epoch=placement.epoch,
            request_id=worker_request_id,
            prompt=job.prompt,
            sampling=convert.sampling_to_wire(job.sampling),
            priority=job.priority,
            tenant_salt=job.tenant_salt,
            speculate=job.speculate,
            reuse=job.reuse,
        )
        timeout_s = None if job.deadline is None else max(0.0, job.deadline - time.monotonic())
        async with aclosing(self._workers.generate(placement, request, timeout_s)) as messages:
            await anext(messages)
            relay.accepted()
            async with active.held_by(lambda: self._workers.cancel(placement, worker_request_id)):
                async for message in messages:
                    yield message


def _lost(position: int) -> Unavailable:
    return Unavailable(f"The worker was lost after {position} tokens of the answer: send the request again.")
