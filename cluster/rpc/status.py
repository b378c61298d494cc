"""Errors on the wire: the error tree to gRPC statuses and back.

Invariant: what leaves a server is the sentence of a `TandemError`, never an exception's text. Going the other way, the
text of a status is believed only if one of our servers sent it; one that gRPC itself made gets a sentence of ours.
Called by `cluster.rpc.methods` (servers), `cluster.gateway.worker_client` and `cluster.rpc.client` (clients).
"""

import json
import logging
import secrets
from typing import Any, NoReturn

import grpc

from cluster.errors import DeadlineExceeded, Internal, RequestCancelled, TandemError, Unavailable, revive
from cluster.observe.logging import event

ERROR_KEY = "tandem-error-bin"

_log = logging.getLogger(__name__)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends the call with the status of `error`."""
    detail = json.dumps({"kind": type(error).__name__, **error.fields}).encode()
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, ((ERROR_KEY, detail),))
    raise AssertionError("abort always raises")


def internal(method: str, error: BaseException) -> Internal:
    """Logs a defect under a new id, and makes the error that gives the id alone away."""
    error_id = secrets.token_hex(8)
    _log.error(event("internal_error", error_id=error_id, method=method), exc_info=error)
    return Internal(error_id)


def error_of(failure: grpc.aio.AioRpcError) -> TandemError | None:
    """The error behind a failed call; None if it is neither one of ours nor one that gRPC makes in normal operation."""
    sent = dict(failure.trailing_metadata() or ()).get(ERROR_KEY)
    if isinstance(sent, bytes):
        fields = json.loads(sent)
        return revive(fields.pop("kind"), fields)
    match failure.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable("The server can't be reached: see that it runs, then try again.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("The deadline passed before the answer was complete: allow more time.")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled("The request was cancelled.")
    return None
