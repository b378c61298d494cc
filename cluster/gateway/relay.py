"""One worker's messages as the client's responses.

Invariant: positions given out are 0, 1, 2, ... without gap or repetition; times are differences on the gateway's own
monotonic clock. Made by `cluster.gateway.generation`, one for each attempt.
"""

import time

from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc._generated.tandem.v1 import tandem_pb2


class Relay:
    """Relays the stream of one request that arrived at the time `arrived`. `position` counts the tokens given out."""

    def __init__(self, request_id: str, worker_id: str, arrived: float) -> None:
        self._request_id, self._worker_id, self._arrived = request_id, worker_id, arrived
        self._accepted: float | None = None
        self._first_token: float | None = None
        self.position = 0

    def accepted(self) -> None:
        """The worker has the request now."""
        self._accepted = time.monotonic()

    def responses(self, message: worker_pb2.GenerateResponse) -> list[tandem_pb2.GenerateResponse]:
        """The delta and the completion in `message`, where it has them."""
        responses = []
        if message.token_ids or message.text:
            responses.append(tandem_pb2.GenerateResponse(request_id=self._request_id, delta=self._delta(message)))
        if message.HasField("completion"):
            completion = self._completion(message.completion)
            responses.append(tandem_pb2.GenerateResponse(request_id=self._request_id, completion=completion))
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
        completion.timings.queue_s = (self._accepted or now) - self._arrived
        completion.timings.time_to_first_token_s = (self._first_token or now) - self._arrived
        completion.timings.total_s = now - self._arrived
        return completion


def cancelled_before_start(request_id: str, prompt_tokens: int, arrived: float) -> tandem_pb2.GenerateResponse:
    """The end of a request that no worker has begun."""
    completion = tandem_pb2.Completion(
        finish_reason=tandem_pb2.FINISH_REASON_CANCELLED,
        usage=tandem_pb2.Usage(prompt_tokens=prompt_tokens),
        timings=tandem_pb2.Timings(total_s=time.monotonic() - arrived),
    )
    return tandem_pb2.GenerateResponse(request_id=request_id, completion=completion)
