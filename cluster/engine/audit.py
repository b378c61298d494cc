"""The KV audit: is the KV in published blocks what one fresh, unchunked forward of the same tokens computes?

A token sequence is opened and claimed as a request with that prompt would be, so what is compared is exactly what
such a request would reuse: keys and values of every layer of both pools, against a recomputation in a pool of its
own. The draft's is recomputed by its drafter, from the target's hidden states of that same forward. Called when the
engine is idle, in tests and in audit mode: it is slow, and claims touch the order of eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cluster.core.paired_cache import CacheHandle, PairedCache
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.model import LoadedModel
from cluster.speculation.protocol import Drafter
from cluster.speculation.recompute import recompute_model

# Largest difference of an element, as a fraction of the layer's largest: rounding, which chunks and batches change.
TOLERANCE = 1e-4
TOLERANCE_16_BIT = 5e-2


@dataclass(frozen=True, slots=True)
class PublishedSequence:
    """Tokens of a request that has ended, and the salt that its blocks were published under."""

    tokens: tuple[int, ...]
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """`compared` positions of a pool; `worst` is the largest relative difference, and `tolerance` what is allowed."""

    pool: str
    compared: int
    worst: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance  # a NaN is not


class KvAuditor:
    """Audits the pools of one engine; `kv` maps a pool's name to its tensors."""

    def __init__(
        self, target: LoadedModel, drafter: Drafter | None, cache: PairedCache, kv: dict[str, KvTensors]
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._cache = cache
        self._kv = kv

    def audit(self, sequences: Sequence[PublishedSequence]) -> list[PoolAudit]:
        """One result per pool, over all `sequences`. Leaves the pools' meters as they were."""
        compared = dict.fromkeys(self._kv, 0)
        worst = dict.fromkeys(self._kv, 0.0)
        for number, sequence in enumerate(sequences):
            handle = self._cache.open(f"audit-{number}", sequence.tokens, tenant_salt=sequence.tenant_salt)
            try:
                for pool, depth, error in self._compare(handle, sequence.tokens):
                    compared[pool] += depth
                    worst[pool] = _worse(worst[pool], error)
            finally:
                self._cache.free(handle, publish_tail=False)
        return [PoolAudit(pool, compared[pool], worst[pool], _tolerance(kv)) for pool, kv in self._kv.items()]

    def _compare(self, handle: CacheHandle, tokens: tuple[int, ...]) -> list[tuple[str, int, float]]:
        claim = self._cache.claim(handle)
        if claim is None:
            return []
        for copy in claim.copies:
            self._kv[copy.pool].copy_block(copy.src, copy.dst, copy.units)
        hidden_layers = self._drafter.hidden_layers if self._drafter else ()
        fresh, hidden = recompute_model(self._target, tokens, hidden_layers)
        expected = {"target": fresh}
        if self._drafter is not None and "draft" in self._kv:
            expected["draft"] = self._drafter.recompute(tokens, hidden)
        results = []
        for pool, layers in expected.items():
            # A draft writes no slot past its last position, and its recomputation ends there too.
            depth = min(max(handle.cursor(pool), handle.held(pool)), layers[0][0].shape[0])
            first = min(depth, handle.first_read(pool))
            stored = self._kv[pool]
            errors = [
                _difference(have[first:], want[first:depth])
                for layer, pair in enumerate(layers)
                for have, want in zip(stored.read(layer, handle.block_table(pool), depth), pair, strict=True)
            ]
            worst = 0.0
            for error in errors:
                worst = _worse(worst, error)
            results.append((pool, depth - first, worst))
        return results


def _difference(have: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return float((have.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6))


def _worse(a: float, b: float) -> float:
    """The larger; a NaN counts as larger than anything."""
    return a if not b > a and b == b else b


def _tolerance(kv: KvTensors) -> float:
    return TOLERANCE_16_BIT if kv.layout.dtype.itemsize <= 2 else TOLERANCE
