"""The requests that run in this gateway, so that they can be cancelled by id.

Invariant: an id names at most one running request of a tenant, and no tenant can name another's. Called by
`cluster.gateway.generation`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from cluster.errors import InvalidRequest

Stop = Callable[[], Awaitable[object]]


class ActiveRequest:
    """One running request; its end may be asked for before a worker has it."""

    def __init__(self) -> None:
        self.cancelled = False
        self._stop: Stop | None = None

    async def cancel(self) -> None:
        """Asks for its end: of the worker that has it, or else of whoever is about to pass it on."""
        self.cancelled = True
        if self._stop is not None:
            await self._stop()

    @asynccontextmanager
    async def held_by(self, stop: Stop) -> AsyncIterator[None]:
        """While a worker has it; `stop` makes that worker end it, and runs if the end was asked for already."""
        self._stop = stop
        try:
            if self.cancelled:
                await stop()
            yield
        finally:
            self._stop = None


class ActiveRequests:
    """All that run. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], ActiveRequest] = {}

    @contextmanager
    def running(self, tenant: str, request_id: str) -> Iterator[ActiveRequest]:
        """Registers a request for as long as it runs. Raises InvalidRequest when the id is in use."""
        key = (tenant, request_id)
        if key in self._running:
            raise InvalidRequest("request_id", request_id, "unlike that of any running request", "choose another id")
        self._running[key] = request = ActiveRequest()
        try:
            yield request
        finally:
            del self._running[key]

    def find(self, tenant: str, request_id: str) -> ActiveRequest | None:
        """The request of that id, while it runs."""
        return self._running.get((tenant, request_id))

    def __len__(self) -> int:
        return len(self._running)
