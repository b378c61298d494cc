"""Who asks, and which reusable KV they share.

Owns tenants. Invariant: with keys configured, every method but health checks needs one of them; without, there is one
tenant. A tenant's salt is an HMAC under the cluster's secret, so no client can choose or guess another's; without the
salt, the time to first token would tell one tenant what another has asked.
Called by the gateway's servers and `cluster.gateway.service`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from cluster.errors import Unauthenticated
from cluster.rpc import status

HEADER = "authorization"
DEFAULT_TENANT = "default"
_SCHEME = "Bearer "
_OPEN_METHODS = "/grpc.health.v1.Health/"


def digest_of(api_key: str) -> str:
    """The form in which keys are configured: SHA-256, in hexadecimal."""
    return hashlib.sha256(api_key.encode()).hexdigest()


class Tenants:
    """The tenants of a cluster, by the digests of their API keys."""

    def __init__(self, key_digests: Mapping[str, str] | None = None, secret: bytes | None = None) -> None:
        """`key_digests`: tenant to `digest_of` its key; none lets everyone in as one tenant.

        All gateways of a cluster need the same `secret`; without one, a random one is made.
        """
        self._digests = dict(key_digests or {})
        self._secret = secret or secrets.token_bytes(32)

    def tenant_of(self, headers: Iterable[tuple[str, str | bytes]]) -> str:
        """The tenant whose key the request carries. Raises Unauthenticated."""
        if not self._digests:
            return DEFAULT_TENANT
        given = next((value for name, value in headers if name == HEADER), "")
        if not isinstance(given, str) or not given.startswith(_SCHEME):
            raise Unauthenticated(f"{HEADER} is missing, but must be '{_SCHEME}KEY': send your API key there.")
        digest = digest_of(given.removeprefix(_SCHEME))
        # Every entry is compared, in constant time each: how long it takes tells nothing about the keys.
        found = [tenant for tenant, known in self._digests.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthenticated(f"{HEADER} holds an API key that isn't known: ask the operator for a valid one.")
        return found[0]

    def salt_of(self, tenant: str) -> bytes:
        """The 32 bytes that separate the block keys of `tenant` from everyone else's."""
        return hmac.digest(self._secret, tenant.encode(), "sha256")


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Turns away, on every method that isn't open, whoever has no valid key."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses."""
        if not handler_call_details.method.startswith(_OPEN_METHODS):
            try:
                self._tenants.tenant_of(handler_call_details.invocation_metadata)
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await status.abort(context, error)

    # The widest kind of handler can end a call of any kind.
    return grpc.stream_stream_rpc_method_handler(refuse)
