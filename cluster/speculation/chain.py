"""A chain of drafts for several requests at once: choose a token, feed it, choose the next.

Owns how a draft token is chosen: from the draft's own logits, by the target's sampler, with the clocks of the
position that the token would take. So where the draft's distribution equals the target's, the draft is the target's
choice, at any temperature. Called by the drafters that have a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.engine.penalties import needs_history
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.contenders import Contender, contenders
from cluster.speculation.protocol import DraftTask


class DraftChooser:
    """`target_ids` [draft vocabulary] maps a draft's token ids to the target's; None if they are the same."""

    def __init__(self, sampler: Sampler, target_ids: Tensor | None = None) -> None:
        self._sampler = sampler
        self._target_ids = target_ids
        # A draft's map may name ids in the target's padding; the sampler ignores these columns.
        self._width = max(sampler.vocab_size, 0 if target_ids is None else int(target_ids.max()) + 1)

    def choose(
        self, logits: Tensor, tasks: Sequence[DraftTask], drafts: Sequence[Sequence[int]]
    ) -> tuple[int | None, ...]:
        """Target ids that follow each task's tokens and `drafts`; None where a row of `logits` [R, V] isn't finite."""
        rows = [sample_row(task, before) for task, before in zip(tasks, drafts, strict=True)]
        return self._sampler.sample(self._over_target_vocabulary(logits), rows).tokens

    def contenders(self, logits: Tensor, rows: Sequence[SampleRow], count: int) -> list[list[Contender]]:
        """The `count` likeliest tokens, as target ids, after each row of `logits` [R, V]; see `contenders`."""
        return contenders(self._sampler, self._over_target_vocabulary(logits), rows, count)

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        if self._target_ids is not None:
            spread = logits.new_full((logits.shape[0], self._width), -torch.inf)
            return spread.index_copy_(1, self._target_ids, logits)
        return F.pad(logits, (0, max(0, self._width - logits.shape[1])), value=-torch.inf)


def sample_row(task: DraftTask, drafts: Sequence[int]) -> SampleRow:
    """What the target will choose the token after `drafts` with."""
    position = len(task.tokens) + len(drafts)
    params = task.params if task.params.logprobs is None else replace(task.params, logprobs=None)
    allowed = None if task.grammar is None else task.grammar.allowed(drafts)
    if not needs_history(params):
        return SampleRow(params, task.seed, position, allowed=allowed)
    prompt, output = task.tokens[: task.num_prompt], task.tokens[task.num_prompt :]
    return SampleRow(params, task.seed, position, prompt, output, drafts, allowed)


@dataclass(slots=True)
class Chain:
    """The drafts of one task so far, `width` at most. `place` numbers the step's chains that draft anything."""

    task: DraftTask
    width: int
    place: int = 0
    drafts: list[int] = field(default_factory=list)

    def add(self, token: int | None) -> bool:
        """Take a draft; whether the chain goes on after it. None ends it: broken logits cost speed, not the request."""
        if token is not None:
            self.drafts.append(token)
        return token is not None and len(self.drafts) < self.width


class ChainModel(Protocol):
    """The two passes of a model that drafts chains."""

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        """Write every task's slots. Logits [R, V] after the last slot of the tasks at the places `drafting`."""

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        """Run the last draft of each chain, in the slot after those before it. Logits [R, V] that follow."""


def draft_chains(
    tasks: Sequence[DraftTask], shape: DraftShape, chooser: DraftChooser, model: ChainModel
) -> list[Drafts]:
    """The drafts of each task. Raises ValueError for a task that breaks its contract, before anything is written."""
    chains = [Chain(task, task.k) for task in (checked(task, shape) for task in tasks)]
    writing = [chain for chain in chains if chain.task.end > chain.task.start]
    going = [chain for chain in writing if chain.width]
    if not writing:
        return [NO_DRAFTS for _ in tasks]
    for place, chain in enumerate(going):
        chain.place = place
    logits = model.begin([chain.task for chain in writing], [i for i, chain in enumerate(writing) if chain.width])
    while going:
        chosen = chooser.choose(logits, [chain.task for chain in going], [chain.drafts for chain in going])
        going = [chain for chain, token in zip(going, chosen, strict=True) if chain.add(token)]
        if going:
            logits = model.feed(going)
    return [Drafts.chain(chain.drafts) for chain in chains]


def checked(task: DraftTask, shape: DraftShape) -> DraftTask:
    """`task` as far as the draft's positions reach: slots past the last one stay unwritten, and nothing is drafted
    there, so nothing ever reads them. Raises ValueError if the task breaks its contract.
    """
    limit = shape.max_positions
    if limit is not None and task.end > limit:
        task = replace(task, start=min(task.start, limit), end=limit, k=0)
    known = shape.real_slots(len(task.tokens))
    if not 0 <= task.start <= task.end <= known:
        raise ValueError(f"slots [{task.start}, {task.end}) of {task.request_id}: only {known} have real inputs")
    if task.k and (task.end < known or task.start == task.end):
        raise ValueError(
            f"{task.request_id} wants drafts, but its slots [{task.start}, {task.end}) don't end at {known}"
        )
    return replace(task, k=chain_width(task, shape))


def chain_width(task: DraftTask, shape: DraftShape) -> int:
    """How many of the task's k drafts the draft's positions allow. Drafts 1..k-1 are fed in slots end..end+k-2; the
    last one isn't fed and takes none."""
    limit = shape.max_positions
    return task.k if limit is None else min(task.k, limit - task.end + 1)
