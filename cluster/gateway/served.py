"""The model that a gateway serves: what clients may know of it, and its tokenizer.

Invariant: it agrees with what every worker registered; the actors that build it see to that. Read by the gateway.
"""

from dataclasses import dataclass

from cluster.engine.tokenizer import Tokenizer
from cluster.routing.types import ModelCard, PoolSize


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, with the limits that requests are held to."""

    card: ModelCard
    tokenizer: Tokenizer
    pools: tuple[PoolSize, ...]
    method: str = "none"
    num_speculative_tokens: int = 0
    draft: str | None = None

    @property
    def span(self) -> int | None:
        """Lookahead span of the draft's KV; None without a draft pool."""
        return next((pool.span for pool in self.pools if pool.name == "draft"), None)
