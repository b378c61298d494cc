"""One request from validated tokens to the last of its answer, whichever protocol carries it.

Owns the relay. Invariant: positions given out are 0, 1, 2, ... without gap or repetition, and one completion ends them,
or one error. A worker that fails before the first token is passed over once; after that token the request ends as
`Unavailable`.
Called by `cluster.gateway.service` and the HTTP edge.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.core.sampling import SamplingParams
from cluster.errors import CapacityExceeded, StaleEpoch, TandemError, Unavailable
from cluster.gateway.active import ActiveRequest, ActiveRequests
from cluster.gateway.auth import Tenants
from cluster.gateway.dispatcher import Dispatcher
from cluster.gateway.prompts import encode, routing_keys
from cluster.gateway.request import RequestFields
from cluster.gateway.served import ServedModel
from cluster.gateway.validator import Validator
from cluster.gateway.worker_client import WorkerClients
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
    tenant_salt: bytes
    speculate: bool
    reuse: bool
    keys: tuple[bytes, ...]
    arrived: float
    deadline: float | None
    """Both in seconds of this process's monotonic clock."""


class Generation:
    """Runs requests on the cluster. Belongs to one asyncio loop."""

    def __init__(self, served: ServedModel, dispatcher: Dispatcher, tenants: Tenants) -> None:
        self._served, self._dispatcher, self._tenants = served, dispatcher, tenants
        self._validator = Validator(served.card, served.pools)
        self._workers = WorkerClients()
        self.active = ActiveRequests()

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
                _log.info(
                    "event=request_end request_id=%s outcome=%s seconds=%.3f",
                    request_id, outcome, time.monotonic() - arrived,
                )  # fmt: skip

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
                yield _cancelled_before_start(job)
                return
            # Unique in the whole cluster, whatever ids clients choose and however often this one is tried.
            worker_request_id = f"{job.request_id}-{secrets.token_hex(4)}"
            placement = await self._place(job, worker_request_id, excluded)
            relay = _Relay(job, placement.worker_id)
            try:
                async with aclosing(self._stream(job, placement, worker_request_id, active)) as messages:
                    async for message in messages:
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
                _log.warning("event=retry request_id=%s worker=%s", job.request_id, placement.worker_id)

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
        )
        answer = await self._dispatcher.dispatch(query)
        if isinstance(answer, Placement):
            return answer
        if answer.saturated:
            raise CapacityExceeded(answer.reason, answer.retry_after_s)
        raise Unavailable(answer.reason)

    async def _stream(
        self, job: Job, placement: Placement, worker_request_id: str, active: ActiveRequest
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
            await active.accepted(lambda: self._workers.cancel(placement, worker_request_id))
            async for message in messages:
                yield message


class _Relay:
    """Turns one worker's messages into responses, and keeps the times that only the gateway can see."""

    def __init__(self, job: Job, worker_id: str) -> None:
        self._job, self._worker_id = job, worker_id
        self._first_token: float | None = None
        self.position = 0

    def responses(self, message: worker_pb2.GenerateResponse) -> list[tandem_pb2.GenerateResponse]:
        """The delta and the completion in `message`, where it has them."""
        responses = []
        if message.token_ids or message.text:
            responses.append(tandem_pb2.GenerateResponse(request_id=self._job.request_id, delta=self._delta(message)))
        if message.HasField("completion"):
            completion = self._completion(message.completion)
            responses.append(tandem_pb2.GenerateResponse(request_id=self._job.request_id, completion=completion))
        return responses

    def _delta(self, message: worker_pb2.GenerateResponse) -> tandem_pb2.Delta:
        if message.position != self.position:
            raise ValueError(f"worker {self._worker_id} sent position {message.position} after {self.position}")
        if self._first_token is None:
            self._first_token = time.monotonic()
        self.position += len(message.token_ids)
        return tandem_pb2.Delta(
            position=message.position, token_ids=message.token_ids, text=message.text, logprobs=message.logprobs
        )

    def _completion(self, completion: tandem_pb2.Completion) -> tandem_pb2.Completion:
        now = time.monotonic()
        completion.worker_id = self._worker_id
        completion.timings.time_to_first_token_s = (self._first_token or now) - self._job.arrived
        completion.timings.total_s = now - self._job.arrived
        return completion


def _cancelled_before_start(job: Job) -> tandem_pb2.GenerateResponse:
    completion = tandem_pb2.Completion(
        finish_reason=tandem_pb2.FINISH_REASON_CANCELLED,
        usage=tandem_pb2.Usage(prompt_tokens=len(job.prompt)),
        timings=tandem_pb2.Timings(total_s=time.monotonic() - job.arrived),
    )
    return tandem_pb2.GenerateResponse(request_id=job.request_id, completion=completion)


def _lost(position: int) -> Unavailable:
    return Unavailable(f"The worker was lost after {position} tokens of the answer: send the request again.")
