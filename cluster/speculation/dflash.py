"""Drafts by a block of masks that attends to the target's states (DFlash, Chen et al. 2026).

Every layer of the draft turns the target's states into keys and values of its own, which don't change once the state
is known. They are what the draft pool holds: slot i is a function of tokens 0..i, written once, keyed, reused and
evicted like any other KV, and never computed again. Keeping the states themselves in a further pool would cost more
memory (several layers of the target against a few narrow KV heads), would recompute every key at every step, and
would make one more pool for claims to agree on.

A task's slots are written from the states of that step. Then the last known token, the anchor, and the masks behind it
run through the layers once, in scratch slots; each sees all of the context and, both ways, the whole block.

Invariant: KV of anchor and masks lies at or beyond the task's `end` and is rewritten there, from the target's states,
by the request's next task. Built by the factory, called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.attention import GatherSdpa, PagedAttention
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.sampler import Sampler
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.chain import DraftChooser
from cluster.speculation.dflash_model import DFlashHead
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.parallel import draft_parallel
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.recompute import WHOLE_SEQUENCE, recomputed
from cluster.speculation.recurrent import slot_states
from cluster.speculation.source import DraftSource


def build_dflash(source: DraftSource) -> DFlashDrafter:
    """The draft in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    target = source.target
    borrowed = BorrowedWeights.of(target.model, target.dtype)
    head = DFlashHead.load(source.folder, borrowed, target.dtype, target.num_layers, source.config.allow_pickle)
    source.check_hidden("DFlash draft", head.config.target_hidden_size, head.config.target_layers)
    source.check_rows(head.config.vocab_size)
    return DFlashDrafter(head.to(target.device), source.sampler, source.max_drafts)


class DFlashDrafter:
    """`sampler` is the target's: its vocabulary decides which tokens exist. `head` is ready for inference.

    Of `max_drafts` no more are made than a block holds. The block is always as long as they need, so that what is
    drafted doesn't depend on how many drafts a request wants.
    """

    method = SpeculationMethod.DFLASH

    def __init__(
        self, head: DFlashHead, sampler: Sampler, max_drafts: int, backend: PagedAttention | None = None
    ) -> None:
        self.head = head
        self.kv_layout = head.kv_layout
        self.hidden_layers = head.config.target_layers
        drafts = min(max_drafts, head.config.most_drafts)
        self._first = 0 if head.config.drafts_from_anchor else 1
        self._block = drafts + self._first
        self.shape = DraftShape(
            coupling_of(self.method),
            draft_kv_lookahead(self.method),
            drafts,
            head.config.layer.max_positions,
            scratch=self._block,
        )
        self._chooser = DraftChooser(sampler, head.target_ids)
        self._backend = backend or GatherSdpa()
        self._kv: KvTensors | None = None

    def attach(self, kv: KvTensors) -> None:
        self._kv = kv

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return draft_parallel([self._whole(task) for task in tasks], self.shape, self._chooser, self._one_pass)

    def _whole(self, task: DraftTask) -> DraftTask:
        """`task` without drafts where its block would reach past the draft's last position."""
        limit = self.shape.max_positions
        return task if limit is None or task.end + self._block <= limit else replace(task, k=0)

    @torch.inference_mode()
    def _one_pass(self, tasks: Sequence[DraftTask], widths: Sequence[int]) -> Tensor:
        if self._kv is None:
            raise RuntimeError("no pool is attached")
        context = [
            PagedRow(task.tokens[task.start : task.end], task.start, task.block_table, task.held) for task in tasks
        ]
        self._write(context, torch.cat([slot_states(task) for task in tasks]), self._kv)
        drafting = [(task, width) for task, width in zip(tasks, widths, strict=True) if width]
        if not drafting:
            return torch.empty(0, self.head.config.draft_vocab_size)
        output = self._blocks([task for task, _ in drafting], self._kv)
        rows = [i * self._block + self._first + j for i, (_, width) in enumerate(drafting) for j in range(width)]
        return self.head.logits(output[rows]).float()

    def _write(self, rows: Sequence[PagedRow], states: Tensor, kv: KvTensors) -> None:
        """Keys and values of `states` [T, n * H_target] to the slots of `rows`, in every layer."""
        batch = pack(rows, kv)
        context = self.head.combine(states.to(self.kv_layout.dtype))
        for layer, (keys, values) in enumerate(self.head.context(context, batch.positions[0])):
            kv.write(layer, batch.slots, keys, values)

    def _blocks(self, tasks: Sequence[DraftTask], kv: KvTensors) -> Tensor:
        """States [len(tasks) * block, H] of each task's block: its last token and the masks."""
        masks = (self.head.config.mask_token,) * (self._block - 1)
        each_other = torch.ones(self._block, self._block, dtype=torch.bool)
        rows = [PagedRow((task.tokens[-1], *masks), task.end, task.block_table, visible=each_other) for task in tasks]
        batch = pack(rows, kv)
        plan = windowed = self._backend.plan(batch, kv)
        if self.head.config.causal_windows:
            windowed = self._backend.plan(pack([replace(row, visible=None) for row in rows], kv), kv)
        return self.head.forward(batch.input_ids[0], batch.positions[0], plan, windowed)

    def forget(self, request_id: str) -> None:
        """Nothing is remembered about a request but its KV."""

    @torch.inference_mode()
    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        if hidden is None:
            raise ValueError(f"{self.method} needs the target's hidden states")
        tokens = tokens[: self.shape.max_positions]

        def run(kv: KvTensors) -> None:
            self._write([PagedRow(tokens, 0, WHOLE_SEQUENCE)], hidden[: len(tokens)], kv)

        return recomputed(self.kv_layout, self.head.device, len(tokens), run)
