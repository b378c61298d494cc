"""The modes that draft with a target's multi-token-prediction layers.

`mtp_eagle` applies the first layer again and again: a head that is fed its own output, with a span of 1. `mtp` applies
D layers once each, layer k to draft token k + 1, with a span of D: the slot i of layer k holds what it made of tokens
up to i+1+k. A task's slots [start, end) have all of these tokens. To draft, the layers run one after the other over
the slots from `start` up to the last whose state the target has computed; those at or beyond `end` read tokens that
were only just drafted, so they are scratch, and written anew by the next task.

Invariant of `mtp`: the target's states of the slots from a request's last `end` on are kept here, D - 1 of them, until
the next task needs them again; after a claim the target computes them afresh. Built by the factory, called by the step
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.engine.attention import AttentionPlan, GatherSdpa, PagedAttention
from cluster.engine.batch import PackedBatch, PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.engine.sampler import Sampler
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.chain import DraftChooser, checked
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.mtp_model import MtpStack, load_mtp
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.recompute import WHOLE_SEQUENCE, recomputed
from cluster.speculation.recurrent import RecurrentDrafter
from cluster.speculation.source import DraftSource


def build_mtp_eagle(source: DraftSource) -> RecurrentDrafter:
    """The first MTP layer as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    head = RecurrentMtp(_load(source))
    return RecurrentDrafter(SpeculationMethod.MTP_EAGLE, head, source.sampler, source.max_drafts, source.tree)


def build_mtp(source: DraftSource) -> MtpDrafter:
    """All MTP layers as a drafter. Raises ModelLoadError if they can't be loaded or don't fit."""
    return MtpDrafter(_load(source), source.sampler, source.max_drafts)


def _load(source: DraftSource) -> MtpStack:
    target = source.target
    stack = load_mtp(source.folder, BorrowedWeights.of(target.model), target.dtype, target.num_layers)
    source.check_hidden("MTP layer", stack.layer(0).eh_proj.out_features, (stack.hidden_layer,))
    for layer in map(stack.layer, range(len(stack))):
        source.check_rows(len(layer.embedding))
        source.check_rows(len(layer.head))
    return stack.to(target.device)


class RecurrentMtp:
    """The first layer as a `HiddenHead`: fed with its own output, it drafts on and on."""

    target_ids: Tensor | None = None

    def __init__(self, stack: MtpStack) -> None:
        self._layer = stack.layer(0)
        whole = stack.layout()
        self.kv_layout = KvLayout(whole.layers[:1], whole.dtype)
        self.hidden_layers = (stack.hidden_layer,)
        self.max_positions = stack.max_positions
        self.device = stack.device

    def combine(self, states: Tensor) -> Tensor:
        """The states [T, H] as they are."""
        return states

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """One draft step: `token_ids` [T], `hidden` [T, H], `positions` [T] -> feedback [T, H]."""
        output: Tensor = self._layer(token_ids, hidden, positions, plan)
        return output

    def logits(self, feedback: Tensor) -> Tensor:
        """Draft logits [R, vocabulary] of `forward`'s output [R, H]."""
        return self._layer.logits(feedback)


@dataclass(slots=True)
class _Rows:
    """One task on its way through the layers. `hidden` [*, H] are the states of its slots from `start` on, of the layer
    before; slots end at `stop`."""

    task: DraftTask
    hidden: Tensor
    stop: int
    drafts: list[int] = field(default_factory=list)

    def inputs(self, k: int) -> tuple[int, ...]:
        """The tokens that layer `k` reads in the slots that it can compute: those whose token is known or drafted."""
        start, known = self.task.start, len(self.task.tokens)
        stop = min(self.stop, known + len(self.drafts) - 1 - k)
        first = start + 1 + k
        real = tuple(self.task.tokens[first : stop + 1 + k])
        return real + tuple(self.drafts[max(0, first - known) : max(0, stop + 1 + k - known)])


class MtpDrafter:
    """`sampler` is the target's: its vocabulary decides which tokens exist. At most as many drafts as layers."""

    method = SpeculationMethod.MTP

    def __init__(
        self, stack: MtpStack, sampler: Sampler, max_drafts: int, backend: PagedAttention | None = None
    ) -> None:
        depth = len(stack)
        self.kv_layout = stack.layout()
        self.hidden_layers = (stack.hidden_layer,)
        self.shape = DraftShape(
            coupling_of(self.method),
            draft_kv_lookahead(self.method, depth),
            min(max_drafts, depth),
            stack.max_positions,
            scratch=depth - 1,
        )
        self._stack = stack
        self._chooser = DraftChooser(sampler)
        self._backend = backend or GatherSdpa()
        self._kv: KvTensors | None = None
        self._kept: dict[str, tuple[int, Tensor]] = {}
        """Of each request: a position, and the target's states from there on."""

    def attach(self, kv: KvTensors) -> None:
        self._kv = kv

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        if self._kv is None:
            raise RuntimeError("no pool is attached")
        within = [self._within(task) for task in tasks]
        states = [self._states(task) for task in within]
        rows = [self._rows(task, *given) for task, given in zip(within, states, strict=True)]
        for task, (first, hidden) in zip(within, states, strict=True):
            self._kept[task.request_id] = task.end, hidden[max(0, task.end - first) :].clone()
        writing = [each for each in rows if each is not None]
        for k in range(len(self._stack)):
            writing = self._pass(k, writing, self._kv)
        return [NO_DRAFTS if each is None else Drafts.chain(each.drafts) for each in rows]

    def _within(self, task: DraftTask) -> DraftTask:
        """Nothing is drafted while there are no more tokens than layers, nor where the slot of the last known state
        lies past the layers' last position."""
        known, limit = len(task.tokens), self.shape.max_positions
        if not self.shape.real_slots(known) or (limit is not None and known - 1 > limit):
            task = replace(task, k=0)
        return checked(task, self.shape)

    def _states(self, task: DraftTask) -> tuple[int, Tensor]:
        """A position, and the target's states [m, H] from there on: what was kept, and what this step computed."""
        if task.hidden is None:
            raise ValueError(f"{task.request_id}: MTP layers need the target's hidden states")
        first, kept = self._kept.get(task.request_id, (task.hidden_start, task.hidden[:0]))
        if not first <= task.hidden_start <= first + len(kept):
            return task.hidden_start, task.hidden  # after a new claim, the target started before what was kept
        return first, torch.cat([kept[: task.hidden_start - first], task.hidden])

    @staticmethod
    def _rows(task: DraftTask, first: int, hidden: Tensor) -> _Rows | None:
        stop = len(task.tokens) - 1 if task.k else task.end
        if task.end <= task.start:
            return None
        if first > task.start or first + len(hidden) < stop:
            raise ValueError(
                f"{task.request_id}: slots [{task.start}, {stop}) need hidden states of all, but there are those "
                f"of [{first}, {first + len(hidden)})"
            )
        return _Rows(task, hidden[task.start - first : stop - first], stop)

    def _pass(self, k: int, writing: Sequence[_Rows], kv: KvTensors) -> list[_Rows]:
        """Layer `k` over every task's slots; chooses the draft that it gives. Returns the tasks, for the next layer."""
        if not writing:
            return []
        inputs = [rows.inputs(k) for rows in writing]
        batch = pack(
            [
                PagedRow(tokens, rows.task.start, rows.task.block_table, rows.task.held)
                for rows, tokens in zip(writing, inputs, strict=True)
            ],
            kv,
        )
        hidden = torch.cat([rows.hidden[: len(tokens)] for rows, tokens in zip(writing, inputs, strict=True)])
        output = self._run(k, batch, hidden, kv)
        for rows, extent in zip(writing, batch.rows, strict=True):
            rows.hidden = output[extent.offset : extent.offset + extent.length]
        drafting = [rows for rows in writing if len(rows.drafts) == k < rows.task.k]
        if drafting:
            logits = self._stack.layer(k).logits(torch.stack([rows.hidden[-1] for rows in drafting])).float()
            chosen = self._chooser.choose(logits, [rows.task for rows in drafting], [rows.drafts for rows in drafting])
            for rows, token in zip(drafting, chosen, strict=True):
                rows.drafts += [] if token is None else [token]
        return list(writing)

    def _run(self, k: int, batch: PackedBatch, hidden: Tensor, kv: KvTensors) -> Tensor:
        plan = self._backend.plan(batch, kv)
        output: Tensor = self._stack.layer(k)(batch.input_ids[0], hidden, batch.positions[0], plan)
        return output

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    @torch.inference_mode()
    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        if hidden is None:
            raise ValueError("MTP layers need the target's hidden states")
        depth = len(self._stack)
        slots = max(0, min(len(tokens) - depth, self.shape.max_positions or len(tokens)))

        def run(kv: KvTensors) -> None:
            states = hidden[:slots]
            for k in range(depth):
                batch = pack([PagedRow(tokens[1 + k : 1 + k + slots], 0, WHOLE_SEQUENCE)], kv)
                states = self._run(k, batch, states, kv)

        return recomputed(self.kv_layout, self._stack.device, slots, run)
