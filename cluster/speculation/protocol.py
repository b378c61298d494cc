"""The contract between the step loop and whatever makes drafts.

A drafter is asked once a step, after verification, for all requests at once. Slot i of a request's draft KV is a
function of tokens 0..i+span (`lookahead`); the step loop names the slots whose inputs are now real, and the drafter
writes exactly those before it drafts. Invariant: KV of drafted tokens goes to slots at or beyond `end`, which the
next task of the request rewrites from real inputs, so a rejected draft leaves no trace. Implemented by `ngram`,
`draft_model`, `eagle3`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.core.sampling import SamplingParams
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.speculation.lookahead import SpeculationMethod

LayerKeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One request's share of a drafting step: the slots [start, end) to write, and how deep to draft after them.

    Where drafts are wanted, end == shape.real_slots(len(tokens)); a chunk of a prompt (k = 0) may end earlier.
    `k` bounds the length of a chain and the depth of a tree.
    `params`, `seed` and `num_prompt` are what the target samples with, so that a drafter can race with the same clocks.
    """

    request_id: str
    tokens: Sequence[int]
    """All known tokens, the newly sampled one included; the first `num_prompt` are the prompt.

    The engine's own list: when the request ends, it has those of the last step too."""
    start: int
    end: int
    """At most shape.real_slots(len(tokens)), so that every input of these slots is real."""
    k: int
    params: SamplingParams
    seed: int
    num_prompt: int
    block_table: Sequence[int] = ()
    """Draft blocks for slots [0, end + shape.scratch_for(k))."""
    held: int = 0
    """Slots below it lie in blocks that others read; they are not written."""
    hidden_start: int = 0
    hidden: Tensor | None = None
    """[m, n * H], the target's states at positions [hidden_start, hidden_start + m), for drafters with `hidden_layers`.

    They are all that this step computed: up to the last token but one (the target has yet to compute the newest), or
    to the end of a chunk. `hidden_start` is `start`, or lies behind it where the span is above 1: then the drafter
    keeps the states of positions from its last `end` on.
    """
    tenant: bytes | None = b""
    """Salt of the tenant, within which stays what is remembered beyond a request; None where nothing may be."""
    grammar: GrammarMatcher | None = None
    """What the output may go on with, for drafters that choose tokens; drafts that it rules out are cut anyway."""


class Drafter(Protocol):
    """Makes drafts. Not thread-safe; owned by one engine."""

    @property
    def method(self) -> SpeculationMethod: ...

    @property
    def shape(self) -> DraftShape:
        """What the planner must know: coupling, span, most drafts, most positions."""

    @property
    def kv_layout(self) -> KvLayout | None:
        """What the draft pool stores for a slot; None for a drafter without KV."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices into the target's hidden states (0 is the embedding) that `DraftTask.hidden` concatenates."""

    def attach(self, kv: KvTensors) -> None:
        """Use this pool from now on. Called once, before the first task, for drafters with a `kv_layout`."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """Drafts at most `k` deep for each task; fewer at the draft's last position or where it sees no match."""

    def forget(self, request_id: str) -> None:
        """Drop what is remembered about a request that ended or was preempted; unknown ids are fine."""

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        """Keys and values [len(tokens) - span, kv_heads, head_dim] of each layer, in one unchunked pass; fewer
        where the draft's last position comes before.

        `hidden` [len(tokens), n * H] are the target's states. The KV audit compares published blocks with this.
        """
