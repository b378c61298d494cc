"""Drafts by a head over the target's hidden states that is fed its own output, with paged KV (Li et al. 2024, 2025).

Slot i holds the pair (H_i, t_{i+1}), at RoPE position i. A task's slots are written in one pass from the target's own
states; its last row yields the first draft. Each further draft is fed with the previous pass's own output in place of
H, in the slots from `end` on: scratch, which the next task of the request rewrites from the target. In a chunk of a
prompt the last slot takes the prompt's next token, never a sampled one.

Owns `HiddenHead`, what such a head must offer whatever its layout, and the drafter that serves any of them. Invariant:
a head holds no KV; all of its attention goes through the plan that it is given, so the same code runs paged here and
over whole sequences in training. Built by the modes' `build` functions, called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.attention import AttentionPlan, GatherSdpa, PagedAttention
from cluster.engine.batch import PackedBatch, PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.engine.sampler import Sampler
from cluster.speculation.chain import Chain, DraftChooser, draft_chains
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.recompute import WHOLE_SEQUENCE, recomputed
from cluster.speculation.tree import TreeShape, draft_trees


class HiddenHead(Protocol):
    """A head that drafts the token after next from pairs of a hidden state and the token that follows it."""

    @property
    def kv_layout(self) -> KvLayout:
        """What the head's attention layers store for a slot, in their own order; its dtype is the head's."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices into the target's hidden states (0 is the embedding) that `combine` expects, in order."""

    @property
    def max_positions(self) -> int | None:
        """Positions that the head can hold; None if it states no limit."""

    @property
    def target_ids(self) -> Tensor | None:
        """[V_draft] int64, the target's id of each of the head's ids; None if they are the same."""

    @property
    def device(self) -> torch.device: ...

    def combine(self, states: Tensor) -> Tensor:
        """Target states [T, n * H_target] as the head reads them [T, H]; done once per target position."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """One draft step: `token_ids` [T], `hidden` [T, H], `positions` [T] -> feedback [T, H].

        `hidden` is what `combine` made of the target's states, or the feedback of the step before. KV goes through
        `plan.run`, under layer indices from 0.
        """
        ...

    def logits(self, feedback: Tensor) -> Tensor:
        """Logits [R, V_draft] of feedback [R, H]."""
        ...


class RecurrentDrafter:
    """`sampler` is the target's: its vocabulary decides which tokens exist. `head` is ready for inference.

    Drafts are chains of at most `max_drafts` tokens, or trees of that depth where `tree` says how wide they are.
    """

    def __init__(
        self,
        method: SpeculationMethod,
        head: HiddenHead,
        sampler: Sampler,
        max_drafts: int,
        tree: TreeShape | None = None,
        backend: PagedAttention | None = None,
    ) -> None:
        self.method = method
        self.head = head
        self.kv_layout = head.kv_layout
        self.hidden_layers = head.hidden_layers
        scratch = tree.scratch(max_drafts) if tree else None
        self.shape = DraftShape(
            coupling_of(method), draft_kv_lookahead(method), max_drafts, head.max_positions, scratch
        )
        self._tree = tree
        self._chooser = DraftChooser(sampler, head.target_ids)
        self._backend = backend or GatherSdpa()
        self._kv: KvTensors | None = None

    def attach(self, kv: KvTensors) -> None:
        self._kv = kv

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        if self._kv is None:
            raise RuntimeError("no pool is attached")
        passes = _HeadPasses(self, self._kv)
        if self._tree is None:
            return draft_chains(tasks, self.shape, self._chooser, passes)
        return draft_trees(tasks, self.shape, self._tree, self._chooser, passes)

    @torch.inference_mode()
    def run(self, batch: PackedBatch, hidden: Tensor, kv: KvTensors) -> Tensor:
        """The head over a packed batch: `hidden` [T, H] -> feedback [T, H]. KV is written to `kv`."""
        plan = self._backend.plan(batch, kv)
        return self.head.forward(batch.input_ids[0], hidden, batch.positions[0], plan)

    @torch.inference_mode()
    def combine(self, states: Tensor) -> Tensor:
        """The target's states [T, n * H_target] as the head reads them [T, H]."""
        return self.head.combine(states.to(self.kv_layout.dtype))

    @torch.inference_mode()
    def logits(self, feedback: Tensor) -> Tensor:
        """Logits [R, V_draft] float32 of feedback [R, H]."""
        return self.head.logits(feedback).float()

    def forget(self, request_id: str) -> None:
        """Nothing is remembered about a request but its KV."""

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        if hidden is None:
            raise ValueError(f"{self.method} needs the target's hidden states")
        tokens = tokens[1:][: self.shape.max_positions]
        states = self.combine(hidden[: len(tokens)])

        def run(kv: KvTensors) -> None:
            self.run(pack([PagedRow(tokens, 0, WHOLE_SEQUENCE)], kv), states, kv)

        return recomputed(self.kv_layout, self.head.device, len(tokens), run)


def slot_states(task: DraftTask) -> Tensor:
    """The target's states [end - start, n * H] of the slots to write. Raises ValueError if the task lacks some."""
    first, last = task.start - task.hidden_start, task.end - task.hidden_start
    if task.hidden is None or first < 0 or last > task.hidden.shape[0]:
        raise ValueError(f"{task.request_id}: slots [{task.start}, {task.end}) need as many hidden states")
    return task.hidden[first:last]


class _HeadPasses:
    """The passes of one step. Keeps the last output of each chain, or of each node of a tree's last level, which the
    next pass reads."""

    def __init__(self, drafter: RecurrentDrafter, kv: KvTensors) -> None:
        self._drafter = drafter
        self._kv = kv
        self._outputs = torch.empty(0)

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        rows = [
            PagedRow(task.tokens[task.start + 1 : task.end + 1], task.start, task.block_table, task.held)
            for task in tasks
        ]
        batch = pack(rows, self._kv)
        states = self._drafter.combine(torch.cat([slot_states(task) for task in tasks]))
        output = self._drafter.run(batch, states, self._kv)
        self._outputs = output[[batch.rows[place].offset + batch.rows[place].length - 1 for place in drafting]]
        return self._drafter.logits(self._outputs)

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        rows = [
            PagedRow(chain.drafts[-1:], chain.task.end + len(chain.drafts) - 1, chain.task.block_table)
            for chain in chains
        ]
        places = [chain.place for chain in chains]
        if len(places) == len(self._outputs):  # all go on; picking rows costs as much as a small product
            output = self._outputs = self._drafter.run(pack(rows, self._kv), self._outputs, self._kv)
        else:
            output = self._drafter.run(pack(rows, self._kv), self._outputs[places], self._kv)
            self._outputs[places] = output
        return self._drafter.logits(output)

    def grow(self, rows: Sequence[PagedRow], parents: Sequence[int]) -> Tensor:
        self._outputs = self._drafter.run(pack(rows, self._kv), self._outputs[list(parents)], self._kv)
        return self._drafter.logits(self._outputs)
