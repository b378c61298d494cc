"""Public messages to the gateway's own values and back.

Invariant: nothing is judged or defaulted here; that is the validator's. Called by `cluster.gateway.service`.
"""

from dataclasses import asdict

from cluster.gateway.accuracy import RoutingAccuracy
from cluster.gateway.dispatcher import ClusterState
from cluster.gateway.request import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    RequestFields,
    SamplingFields,
    TextPrompt,
    TokenPrompt,
)
from cluster.gateway.served import ServedModel
from cluster.routing.decisions import Explanation
from cluster.routing.types import WorkerStatus
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.convert import sampling_fields

_STATES = {
    "starting": tandem_pb2.WORKER_STATE_STARTING,
    "live": tandem_pb2.WORKER_STATE_READY,
    "suspect": tandem_pb2.WORKER_STATE_SUSPECT,
    "draining": tandem_pb2.WORKER_STATE_DRAINING,
    "dead": tandem_pb2.WORKER_STATE_DEAD,
}


def request_from_wire(message: tandem_pb2.GenerateRequest) -> RequestFields:
    """What the client set."""
    return RequestFields(
        prompt=_prompt(message),
        sampling=SamplingFields(**sampling_fields(message.sampling)),
        model=message.model,
        request_id=message.request_id,
        priority=message.priority if message.HasField("priority") else None,
        speculate=message.speculate if message.HasField("speculate") else None,
        reuse=message.reuse if message.HasField("reuse") else None,
        worker_id=message.worker_id,
    )


def _prompt(message: tandem_pb2.GenerateRequest) -> Prompt | None:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return ChatPrompt(tuple(ChatMessage(each.role, each.content) for each in message.chat.messages))
        case "tokens":
            return TokenPrompt(tuple(message.tokens.ids))
    return None


def model_to_wire(served: ServedModel) -> tandem_pb2.Model:
    """The model as ListModels shows it."""
    return tandem_pb2.Model(
        name=served.card.name,
        max_len=served.card.max_len,
        vocab_size=served.card.vocab_size,
        speculation_method=served.method,
        num_speculative_tokens=served.num_speculative_tokens,
        lookahead_span=served.span,
        draft=served.draft,
    )


def explanation_to_wire(told: Explanation) -> tandem_pb2.PlacementDecision:
    """One decision as Explain shows it."""
    candidates = [
        tandem_pb2.PricedWorker(
            worker_id=each.worker_id,
            target_tokens=each.target_tokens,
            draft_tokens=each.draft_tokens,
            cost=[tandem_pb2.CostTerm(name=name, ms=ms) for name, ms in each.cost_ms.items()],
        )
        for each in told.candidates
    ]
    others = [tandem_pb2.PassedOverWorker(worker_id=name, reason=why) for name, why in sorted(told.passed_over.items())]
    return tandem_pb2.PlacementDecision(
        age_s=told.age_s,
        prompt_tokens=told.prompt_tokens,
        worker_id=told.chosen,
        candidates=candidates,
        passed_over=others,
    )


def status_to_wire(
    served: ServedModel, state: ClusterState, accuracy: RoutingAccuracy, version: str
) -> tandem_pb2.ClusterStatusResponse:
    """The cluster as ClusterStatus shows it."""
    return tandem_pb2.ClusterStatusResponse(
        model=model_to_wire(served),
        workers=[_worker(each) for each in sorted(state.workers, key=lambda worker: worker.info.worker_id)],
        version=version,
        directory_up=state.directory_up,
        routing=tandem_pb2.RoutingAccuracy(**asdict(accuracy)),
    )


def _worker(status: WorkerStatus) -> tandem_pb2.Worker:
    usage = {pool.name: pool for pool in status.load.pools}
    worker = tandem_pb2.Worker(
        worker_id=status.info.worker_id,
        epoch=status.info.epoch,
        state=_STATES.get(status.state, tandem_pb2.WORKER_STATE_UNSPECIFIED),
        running_requests=status.load.running,
        waiting_requests=status.load.waiting,
    )
    for size in status.info.pools:
        pool = worker.pools.add(
            name=size.name, block_size=size.block_size, total_blocks=size.num_blocks, bytes=size.num_bytes
        )
        if size.name in usage:
            pool.free_blocks = usage[size.name].free
            pool.cached_blocks = usage[size.name].cached
            pool.in_use_blocks = usage[size.name].in_use
    return worker
