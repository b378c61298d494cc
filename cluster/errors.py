"""The one tree of errors that may reach a user.

    TandemError
     ├ ConfigError            start-up configuration is wrong            INVALID_ARGUMENT     400
     ├ ModelLoadError         a model folder or file can't be served     FAILED_PRECONDITION  500
     ├ InvalidRequest         one field of a request is wrong            INVALID_ARGUMENT     400
     │  └ PromptTooLarge      the prompt can never fit the KV pools      INVALID_ARGUMENT     400
     ├ ModelNotFound          no such model is served                    NOT_FOUND            404
     ├ Unauthenticated        no key, or a wrong one                     UNAUTHENTICATED      401
     ├ CapacityExceeded       the queue is full; try again later         RESOURCE_EXHAUSTED   429
     ├ StaleEpoch             addressed to an earlier life of a worker   FAILED_PRECONDITION  409
     ├ Unavailable            no worker can take the request now         UNAVAILABLE          503
     ├ DeadlineExceeded       the client's deadline passed               DEADLINE_EXCEEDED    504
     ├ RequestCancelled       the client gave up                         CANCELLED            499
     └ Internal               a defect; only an id leaves the server     INTERNAL             500

Invariant: `str(error)` is a sentence made for the user. It names the field, the value, the limit and what to do, and
holds nothing from inside the server. Every other exception is a defect, which the edges turn into `Internal`.
Raised everywhere; mapped to wire codes only by `cluster.rpc.status` and the HTTP edge.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

_SHOWN_CHARS = 64


class TandemError(Exception):
    """Root of every error that may reach a user."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def fields(self) -> dict[str, object]:
        """What the error holds, by name: strings and numbers, the message among them."""
        return dict(self.__dict__)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries by value, and subclasses take other arguments than the message.
        return revive, (type(self).__name__, self.fields)


def revive(kind: str, fields: Mapping[str, object]) -> TandemError:
    """The error whose class and `fields` these were; a plain `TandemError` when the class is not known here."""
    found = next((each for each in _subclasses(TandemError) if each.__name__ == kind), TandemError)
    error = found.__new__(found)
    error.args = (fields["message"],)
    error.__dict__.update(fields)
    return error


def _subclasses(kind: type[TandemError]) -> Iterator[type[TandemError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


class ConfigError(TandemError):
    """The start-up configuration is wrong (exit code 2)."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class ModelLoadError(TandemError):
    """A model folder or file can't be served (exit code 3)."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 500


class InvalidRequest(TandemError):
    """One field of a request breaks a limit."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        """`limit` completes "must be ..."; `remedy` is an instruction without full stop, as in "shorten the prompt"."""
        self.field, self.value, self.limit, self.remedy = field, show(value), limit, remedy
        super().__init__(f"{field} is {self.value}, but must be {limit}: {remedy}.")


class PromptTooLarge(InvalidRequest):
    """The prompt can never fit the KV pools, however idle the worker is."""

    def __init__(self, needed_blocks: int, available_blocks: int, largest_prompt: int, pool: str = "target") -> None:
        self.needed_blocks, self.available_blocks, self.largest_prompt = needed_blocks, available_blocks, largest_prompt
        super().__init__(
            "prompt",
            f"in need of {needed_blocks} blocks of the {pool} KV pool",
            f"at most {available_blocks} blocks, the size of that pool",
            f"shorten the prompt to {largest_prompt} tokens, lower max_tokens, or serve with more KV memory",
        )


class ModelNotFound(TandemError):
    """No model of this name is served."""

    grpc_code = "NOT_FOUND"
    http_status = 404

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        self.model, self.served = model, served
        names = ", ".join(served) or "none"
        super().__init__(f"model is {show(model)}, but must be one of those served ({names}): ask for one of them.")


class Unauthenticated(TandemError):
    """The request carries no API key, or one that isn't known."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class CapacityExceeded(TandemError):
    """The queue is full. `retry_after_s` says when a place is likely to be free."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class StaleEpoch(TandemError):
    """The request was meant for an earlier life of this worker."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409

    def __init__(self, requested: int, current: int) -> None:
        self.requested, self.current = requested, current
        super().__init__(f"epoch is {requested}, but must be {current}, this worker's own: ask for a new placement.")


class Unavailable(TandemError):
    """No worker can take, or go on with, the request now."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(TandemError):
    """The client's deadline passed before the request was done."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class RequestCancelled(TandemError):
    """The client gave the request up."""

    grpc_code = "CANCELLED"
    http_status = 499


class Internal(TandemError):
    """A defect on our side. The details are in the server's log under `error_id`; nothing else leaves the server."""

    grpc_code = "INTERNAL"
    http_status = 500

    def __init__(self, error_id: str) -> None:
        self.error_id = error_id
        super().__init__(f"The server failed on this request: report error id {error_id} to its operator.")


def show(value: object) -> str:
    """A value as it may appear in a message: printable, and cut to 64 characters."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else "\ufffd" for char in text[: _SHOWN_CHARS + 1])
    if not text:
        return "empty"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
