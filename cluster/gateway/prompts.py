"""Prompts to token ids, and token ids to the block keys by which they are routed.

Invariant: the keys are those that a worker reports for the same tokens, model and tenant: both come from
`cluster.core.keys`. Called by `cluster.gateway.service`; safe to call from several threads.
"""

from collections.abc import Sequence

from cluster.core.keys import ReuseScope, raw_block_keys
from cluster.engine.tokenizer import Tokenizer
from cluster.gateway.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cluster.routing.packed_keys import PackedKeys
from cluster.routing.types import ModelCard


def encode(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of `prompt`. Raises InvalidRequest when the model has no chat template or it refuses the messages."""
    match prompt:
        case TokenPrompt(ids):
            return ids
        case TextPrompt(text):
            return tuple(tokenizer.encode(text))
        case ChatPrompt(messages):
            return tuple(tokenizer.encode_chat([{"role": each.role, "content": each.content} for each in messages]))


def routing_keys(card: ModelCard, tokens: Sequence[int], tenant_salt: bytes) -> PackedKeys:
    """Raw keys of the full blocks of `tokens`, in order."""
    scope = ReuseScope(
        model=card.fingerprint,
        pool="target",
        span=0,
        kv_dtype=card.kv_dtype,
        block_size=card.block_size,
        tenant_salt=tenant_salt,
    )
    return PackedKeys.of(raw_block_keys(scope, tokens))
