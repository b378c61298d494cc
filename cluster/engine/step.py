"""The tensor side of a step: copies, target forward, sampling and verification, drafting.

Owns the order in which these happen and nothing that outlives the step: what the outcome means for caches and
requests is decided by the engine. Afterwards the KV of accepted drafts lies where decoding them one by one would have
put it: siblings of a tree take slots of their own until then, always past the known tokens and so in the row's own
blocks. A step that raises has changed KV only in such blocks. Called by `Engine.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from cluster.core.batch_plan import RowPlan, StepPlan
from cluster.core.draft_costs import MeasuredCosts
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.paired_cache import CacheHandle
from cluster.engine.batch import PackedBatch, PagedRow, ancestor_mask, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.output import RequestOutput, Taken
from cluster.engine.runner import PagedModel
from cluster.engine.sampler import Sampler
from cluster.engine.verification import RowWalk, walk_rows
from cluster.speculation.protocol import Drafter, DraftTask


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What a row came to. `taken` is None for a chunk of a prompt, and where logits were not finite (`failed`).

    `path` are the nodes of the row's drafts that the target agrees with; of these, the request may take fewer.
    """

    row: RowPlan
    taken: Taken | None = None
    path: tuple[int, ...] = ()
    failed: bool = False
    draft_computed: int = 0
    next_drafts: Drafts = NO_DRAFTS

    @property
    def accepted(self) -> int:
        """Drafts among the tokens that were taken."""
        return min(len(self.path), len(self.taken.tokens)) if self.taken else 0

    @property
    def computed(self) -> list[int]:
        """Places in the row of the tokens whose KV and hidden states are now those of known tokens, all but the newest
        one."""
        drafts = self.path[: len(self.taken.tokens) - 1] if self.taken else ()
        return [*range(self.row.num_known), *(self.row.num_known + node for node in drafts)]


class StepRunner:
    """Runs plans on the target and the drafter. `draft_kv` is None without a draft pool; `costs` learn from every
    step."""

    def __init__(
        self,
        target: PagedModel,
        sampler: Sampler,
        drafter: Drafter | None,
        draft_kv: KvTensors | None,
        costs: MeasuredCosts | None = None,
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._drafter = drafter
        self._costs = costs
        self._kv = {"target": target.kv} if draft_kv is None else {"target": target.kv, "draft": draft_kv}

    def run(self, plan: StepPlan, outputs: Mapping[str, RequestOutput]) -> list[RowOutcome]:
        """Carry out `plan`; one outcome per row, in order. `outputs` of rows that yield tokens advance."""
        for copy in plan.copies:
            self._kv[copy.pool].copy_block(copy.src, copy.dst, copy.units)
        began = perf_counter()
        batch = pack([_target_row(row) for row in plan.rows], self._target.kv)
        hidden_layers = self._drafter.hidden_layers if self._drafter else ()
        forward = self._target.forward(batch, _logits_index(plan.rows, batch), hidden_layers)
        outcomes = self._verify(plan.rows, forward.logits, outputs)
        self._line_up(outcomes)
        verified = perf_counter()
        outcomes = self._draft(outcomes, batch, forward.hidden, outputs)
        if self._costs is not None:
            self._learn(self._costs, outcomes, verified - began, perf_counter() - verified)
        return outcomes

    @staticmethod
    def _learn(costs: MeasuredCosts, outcomes: Sequence[RowOutcome], target_s: float, draft_s: float) -> None:
        rows = [outcome.row for outcome in outcomes]
        if not all(row.needs_logits and row.num_known == 1 for row in rows):
            costs.observe_prompt(sum(len(row.tokens) for row in rows), target_s + draft_s)
            return
        costs.observe(
            rows=len(rows),
            drafts=sum(row.num_drafts for row in rows),
            verified_depth=sum(row.drafts.depth for row in rows),
            target_s=target_s,
            depth=max(outcome.next_drafts.depth for outcome in outcomes),
            draft_s=draft_s,
        )

    def _verify(
        self, rows: Sequence[RowPlan], logits: Tensor, outputs: Mapping[str, RequestOutput]
    ) -> list[RowOutcome]:
        walks = iter(walk_rows([row for row in rows if row.needs_logits], logits, outputs, self._sampler))
        return [_judge(next(walks)) if row.needs_logits else RowOutcome(row) for row in rows]

    def _line_up(self, outcomes: Sequence[RowOutcome]) -> None:
        """Move the KV of accepted tree nodes to the slots of their positions."""
        source: list[int] = []
        place: list[int] = []
        kv = self._target.kv
        for outcome in outcomes:
            row = outcome.row
            if not row.drafts.is_chain:
                table, drafts = _handle(row).block_table("target"), outcome.computed[row.num_known :]
                source += kv.slots(table, [row.start + i for i in drafts])
                place += kv.slots(table, range(row.known, row.known + len(drafts)))
        kv.move(source, place)

    def _draft(
        self,
        outcomes: list[RowOutcome],
        batch: PackedBatch,
        hidden: Tensor | None,
        outputs: Mapping[str, RequestOutput],
    ) -> list[RowOutcome]:
        """Write the draft's KV for what is known now and propose the drafts of the next step."""
        if self._drafter is None:
            return outcomes
        tasks = [
            self._task(outcome, extent.offset, hidden, outputs[outcome.row.request.request_id])
            for outcome, extent in zip(outcomes, batch.rows, strict=True)
        ]
        proposals = iter(self._drafter.propose([task for task in tasks if task is not None]))
        return [
            outcome
            if task is None
            else replace(outcome, draft_computed=task.end - task.start, next_drafts=_fitting(next(proposals), task))
            for outcome, task in zip(outcomes, tasks, strict=True)
        ]

    def _task(self, outcome: RowOutcome, offset: int, hidden: Tensor | None, output: RequestOutput) -> DraftTask | None:
        """What the drafter is to do for a row; None where drafting has no part in it."""
        row, taken = outcome.row, outcome.taken
        if outcome.failed or not row.request.speculate:
            return None
        start = row.draft_start or 0  # without a draft pool there is nothing to write: [0, 0)
        end = row.draft_end(len(taken.tokens) if taken else 0)
        k = row.drafts_after(len(taken.tokens)) if taken and taken.finish is None else 0
        reads = hidden is not None and row.draft_start is not None
        if end <= start and not k and not reads:
            return None
        return DraftTask(
            request_id=row.request.request_id,
            tokens=output.tokens,
            start=start,
            end=end,
            k=k,
            params=row.request.sampling,
            seed=output.seed,
            num_prompt=len(row.request.prompt),
            block_table=() if row.draft_start is None else _handle(row).block_table("draft"),
            held=0 if row.draft_start is None else _handle(row).held("draft"),
            hidden_start=row.start,
            hidden=None if hidden is None else _states(outcome, hidden[offset:]),
            tenant=row.request.tenant_salt if row.request.reuse else None,
            grammar=output.grammar,
        )


def _handle(row: RowPlan) -> CacheHandle:
    if row.request.handle is None:
        raise RuntimeError(f"request {row.request.request_id} runs without blocks")
    return row.request.handle


def _target_row(row: RowPlan) -> PagedRow:
    handle = _handle(row)
    table, held = handle.block_table("target"), handle.held("target")
    if row.drafts.is_chain:
        return PagedRow(row.tokens, row.start, table, held)
    visible = torch.ones(len(row.tokens), len(row.tokens), dtype=torch.bool).tril()
    visible[row.num_known :, row.num_known :] = ancestor_mask(row.drafts.parents)
    positions = [*range(row.start, row.known), *(row.known - 1 + depth for depth in row.drafts.depths)]
    return PagedRow(row.tokens, row.start, table, held, positions, visible)


def _logits_index(rows: Sequence[RowPlan], batch: PackedBatch) -> Tensor:
    """Of each row that needs logits: its last known token and its drafts."""
    index = [
        extent.offset + i
        for row, extent in zip(rows, batch.rows, strict=True)
        if row.needs_logits
        for i in range(row.num_known - 1, extent.length)
    ]
    return torch.tensor(index, dtype=torch.long, device=batch.slots.device)


def _fitting(drafts: Drafts, task: DraftTask) -> Drafts:
    return drafts if task.grammar is None else task.grammar.fitting(drafts)


def _states(outcome: RowOutcome, hidden: Tensor) -> Tensor:
    """The states [m, n * H] of known tokens, out of those of the row's own and whatever comes after."""
    places = outcome.computed
    return hidden[: len(places)] if outcome.row.drafts.is_chain else hidden[places]


def _judge(walk: RowWalk) -> RowOutcome:
    """Let the output decide how many of a walk's tokens count."""
    if walk.failed:
        return RowOutcome(walk.row, failed=True)
    taken = walk.output.take(walk.walk.tokens, walk.logprobs, walk.row.num_drafts)
    return RowOutcome(walk.row, taken, tuple(walk.walk.path))
