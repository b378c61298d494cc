"""Drafts by an EAGLE3 head over the target's hidden states, with paged KV (Li et al. 2025).

Slot i holds the pair (H_i, t_{i+1}), at RoPE position i. A task's slots are written in one pass from the target's own
states; its last row yields the first draft. Each further draft is fed with the previous pass's own output in place of
H, in the slots from `end` on: scratch, which the next task of the request rewrites from the target. In a chunk of a
prompt the last slot takes the prompt's next token, never a sampled one. Called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.attention import AttentionSpec, GatherSdpa, PagedAttention
from cluster.engine.batch import PackedBatch, PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv
from cluster.engine.sampler import Sampler
from cluster.speculation.chain import Chain, DraftChooser, draft_chains
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.recompute import WHOLE_SEQUENCE, recomputed
from cluster.speculation.source import DraftSource, different_vocabulary


def build_eagle3(source: DraftSource) -> Eagle3Drafter:
    """The head in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    target = source.target
    embedding = cast(Tensor, target.model.get_input_embeddings().weight)
    head = Eagle3Head.load(source.folder, embedding, target.dtype, target.num_layers).to(target.device)
    source.check_hidden("EAGLE3 head", head.config.target_hidden_size, head.aux_layer_ids)
    if head.config.vocab_size != target.vocab_size:
        raise different_vocabulary(f"it has {head.config.vocab_size} tokens, the target {target.vocab_size}")
    return Eagle3Drafter(head, source.sampler, source.max_drafts)


class Eagle3Drafter:
    """`sampler` is the target's: its vocabulary decides which tokens exist."""

    method = SpeculationMethod.EAGLE3

    def __init__(
        self, head: Eagle3Head, sampler: Sampler, max_drafts: int, backend: PagedAttention | None = None
    ) -> None:
        config = head.config
        layer = LayerKv(config.num_kv_heads, config.head_dim, config.head_dim)
        self.kv_layout = KvLayout((layer,) * config.num_layers, head.fc.weight.dtype)
        self.hidden_layers = head.aux_layer_ids
        self.shape = DraftShape(
            coupling_of(self.method), draft_kv_lookahead(self.method), max_drafts, config.max_position_embeddings
        )
        self._head = head
        self._device = head.fc.weight.device
        target_ids = head.to_target_ids(torch.arange(config.draft_vocab_size, device=self._device))
        self._chooser = DraftChooser(sampler, target_ids)
        self._backend = backend or GatherSdpa()
        self._kv: KvTensors | None = None

    def attach(self, kv: KvTensors) -> None:
        self._kv = kv

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        if self._kv is None:
            raise RuntimeError("no pool is attached")
        return draft_chains(tasks, self.shape, self._chooser, _HeadPasses(self, self._kv))

    @torch.inference_mode()
    def run(self, batch: PackedBatch, hidden: Tensor, kv: KvTensors) -> Tensor:
        """The head over a packed batch: `hidden` [T, H] -> its output before the norm [T, H]. KV is written to `kv`."""
        plan = self._backend.plan(batch, kv)
        spec = AttentionSpec(scale=self._head.config.head_dim**-0.5)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = plan.run(layer, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), spec)
            return attended.flatten(1)

        output: Tensor = self._head(batch.input_ids[0], hidden, batch.positions[0], attend)
        return output

    @torch.inference_mode()
    def combine(self, hidden: Tensor) -> Tensor:
        """The target's states [T, n * H] as the head reads them [T, H]."""
        return self._head.combine(hidden.to(self._head.fc.weight.dtype))

    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """Logits [R, draft vocabulary] float32 of outputs [R, H]."""
        return self._head.logits(output).float()

    def forget(self, request_id: str) -> None:
        """Nothing is remembered about a request but its KV."""

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        if hidden is None:
            raise ValueError("an EAGLE3 head needs the target's hidden states")
        tokens = tokens[1:][: self.shape.max_positions]
        states = self.combine(hidden[: len(tokens)])

        def run(kv: KvTensors) -> None:
            self.run(pack([PagedRow(tokens, 0, WHOLE_SEQUENCE)], kv), states, kv)

        return recomputed(self.kv_layout, self._device, len(tokens), run)


class _HeadPasses:
    """The passes of one step. Keeps each chain's last output, which the next pass reads."""

    def __init__(self, drafter: Eagle3Drafter, kv: KvTensors) -> None:
        self._drafter = drafter
        self._kv = kv
        self._outputs = torch.empty(0)

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        rows = [
            PagedRow(task.tokens[task.start + 1 : task.end + 1], task.start, task.block_table, task.held)
            for task in tasks
        ]
        batch = pack(rows, self._kv)
        output = self._drafter.run(batch, self._drafter.combine(torch.cat([_states(task) for task in tasks])), self._kv)
        self._outputs = output[[batch.rows[place].offset + batch.rows[place].length - 1 for place in drafting]]
        return self._drafter.logits(self._outputs)

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        rows = [
            PagedRow(chain.drafts[-1:], chain.task.end + len(chain.drafts) - 1, chain.task.block_table)
            for chain in chains
        ]
        places = [chain.place for chain in chains]
        output = self._drafter.run(pack(rows, self._kv), self._outputs[places], self._kv)
        self._outputs[places] = output
        return self._drafter.logits(output)


def _states(task: DraftTask) -> Tensor:
    """The target's states [end - start, n * H] of the slots to write."""
    first, last = task.start - task.hidden_start, task.end - task.hidden_start
    if task.hidden is None or first < 0 or last > task.hidden.shape[0]:
        raise ValueError(f"{task.request_id}: slots [{task.start}, {task.end}) need as many hidden states")
    return task.hidden[first:last]
