"""Outputs of past requests, each tenant's apart, that later drafts may follow.

Invariant: at most so many outputs, and so many tokens, of all tenants together; the oldest go first. An output is in
here once: one that goes on after a preemption is taken out again, and comes back whole. Called by the suffix drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.speculation.suffix_search import TokenArray, TokenStream

MOST_TOKENS = 1 << 18
"""A draft searches all tokens of its tenant, which takes about half a millisecond at this number."""


@dataclass(frozen=True, slots=True)
class _Output:
    """Where an output lies in its tenant's stream: offsets [start, end), and the boundary after it."""

    tenant: bytes
    request_id: str
    start: int
    end: int


class PastOutputs:
    """`most_outputs` of 0 remembers nothing."""

    def __init__(self, most_outputs: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most_outputs, self._most_tokens = most_outputs, most_tokens
        self._streams: dict[bytes, TokenStream] = {}
        self._outputs: deque[_Output] = deque()
        self._latest: dict[tuple[bytes, str], _Output] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def tokens(self, tenant: bytes) -> TokenArray | None:
        """All that is remembered of a tenant; None if nothing is."""
        stream = self._streams.get(tenant)
        return None if stream is None else stream.tokens

    def add(self, tenant: bytes, request_id: str, tokens: Sequence[int]) -> None:
        """Remember the output of a request that ended or was preempted."""
        stream = self._streams.setdefault(tenant, TokenStream())
        start = stream.end
        stream.extend(tokens)
        output = _Output(tenant, request_id, start, stream.end)
        stream.close()
        self._outputs.append(output)
        self._latest[tenant, request_id] = output
        self._size += len(tokens)
        while len(self._outputs) > self._most_outputs or self._size > self._most_tokens:
            self._drop_oldest()

    def withdraw(self, tenant: bytes, request_id: str, tokens: Sequence[int]) -> None:
        """Take out the request's output if `tokens` continue it: then the request was preempted and goes on.

        An id may be used again by another request; that one's tokens are others.
        """
        output = self._latest.get((tenant, request_id))
        if output is None:
            return
        text = self._streams[tenant].text(output.start, output.end).tolist()
        if text == list(tokens[: len(text)]):
            self._streams[tenant].blank(output.start, output.end)
            del self._latest[tenant, request_id]

    def _drop_oldest(self) -> None:
        output = self._outputs.popleft()
        owner = (output.tenant, output.request_id)
        if self._latest.get(owner) is output:
            del self._latest[owner]
        self._size -= output.end - output.start
        stream = self._streams[output.tenant]
        stream.discard(output.end + 1)
        if not len(stream.tokens):
            del self._streams[output.tenant]
