"""Drafts by an independent smaller model of the same vocabulary (Leviathan et al. 2023).

Slot i holds token i. The draft's pool has its own cursor: a task names the slots from there to the last known token,
be it the tokens of one step, a chunk of a prompt, or a whole prefix that the target had cached and the draft had not.
Tokens that were drafted and then accepted are fed again: it takes the same number of passes, and so KV always comes
from known tokens. Called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.runner import PagedModel
from cluster.engine.sampler import Sampler
from cluster.speculation.chain import Chain, DraftChooser, draft_chains
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.recompute import recompute_model
from cluster.speculation.source import DraftSource


def build_draft_model(source: DraftSource) -> ModelDrafter:
    """The model in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    loaded = load_target(source.folder, source.config.dtype, source.target.device)
    source.check_vocabulary(loaded.vocab_size)
    return ModelDrafter(loaded, source.sampler, source.max_drafts)


class ModelDrafter:
    """`sampler` is the target's: its vocabulary decides which tokens exist."""

    method = SpeculationMethod.DRAFT_MODEL
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, loaded: LoadedModel, sampler: Sampler, max_drafts: int) -> None:
        self.loaded = loaded
        self.kv_layout = loaded.layout
        self.shape = DraftShape(
            coupling_of(self.method), draft_kv_lookahead(self.method), max_drafts, loaded.max_positions
        )
        self.chooser = DraftChooser(sampler)
        self._paged: PagedModel | None = None

    def attach(self, kv: KvTensors) -> None:
        self._paged = PagedModel(self.loaded, kv)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return draft_chains(tasks, self.shape, self.chooser, self)

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        rows = [PagedRow(task.tokens[task.start : task.end], task.start, task.block_table, task.held) for task in tasks]
        return self.run(rows, [int(i in drafting) for i in range(len(rows))])

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        rows = [
            PagedRow(chain.drafts[-1:], chain.task.end + len(chain.drafts) - 1, chain.task.block_table)
            for chain in chains
        ]
        return self.run(rows, [1] * len(rows))

    def run(self, rows: Sequence[PagedRow], tails: Sequence[int]) -> Tensor:
        """Write the rows' KV; logits [sum(tails), V] after each of the last `tails[i]` tokens of row i."""
        if self._paged is None:
            raise RuntimeError("no pool is attached")
        batch = pack(rows, self._paged.kv)
        ends = [row.offset + row.length for row in batch.rows]
        wanted = [i for end, tail in zip(ends, tails, strict=True) for i in range(end - tail, end)]
        index = torch.tensor(wanted, dtype=torch.long, device=self.loaded.device)
        return self._paged.forward(batch, index).logits

    def forget(self, request_id: str) -> None:
        """Nothing is remembered about a request but its KV."""

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        return recompute_model(self.loaded, tokens[: self.shape.max_positions])[0]
