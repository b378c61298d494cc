"""Chooses the target's tokens along the drafts of all rows of a step, and so which drafts are accepted.

Only the choices on a row's walk matter (`cluster.speculation.verify`). Where a choice is just the largest logit, those
of all nodes are made at once. Sampling, penalties, masks and log-probabilities cost far more than a look, so there the
walks go node by node, all of them together: a tree of sixty drafts takes as many choices as tokens come out of it.

Invariant: a choice is a function of its own row, so it is the same either way. Called by the step runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cluster.core.batch_plan import RowPlan
from cluster.engine.output import RequestOutput
from cluster.engine.penalties import needs_history
from cluster.engine.sampler import Sampler, SampleRow, TokenLogprobs
from cluster.speculation.verify import Walk


@dataclass(slots=True)
class RowWalk:
    """The walk of one row; `first` is where the step's logits have its last known token, its drafts come after.

    `logprobs` are those of the walk's tokens. `failed`: logits on the way were not finite, so the row has no tokens.
    """

    row: RowPlan
    output: RequestOutput
    first: int
    walk: Walk = field(init=False)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failed: bool = False
    _choices: dict[int | None, tuple[int | None, TokenLogprobs | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = Walk(self.row.drafts)

    def wanted(self) -> Iterable[int | None]:
        """The nodes after which a choice is to be made next; None is the last known token."""
        params, grammar = self.row.request.sampling, self.output.grammar
        simple = params.temperature <= 0 and params.logprobs is None and grammar is None and not needs_history(params)
        return (None, *range(self.row.num_drafts)) if simple else (self.walk.node,)

    def place(self, node: int | None) -> int:
        """Where the step's logits have what follows `node`."""
        return self.first if node is None else self.first + node + 1

    def sample_row(self, node: int | None) -> SampleRow:
        """What the choice after `node` is made with."""
        request = self.row.request
        drafts = tuple(self.row.drafts.tokens[each] for each in self.row.drafts.path(node))
        position = request.num_known + len(drafts)
        allowed = None if self.output.grammar is None else self.output.grammar.allowed(drafts)
        return SampleRow(request.sampling, self.output.seed, position, request.prompt, request.output, drafts, allowed)

    def tell(self, node: int | None, token: int | None, logprobs: TokenLogprobs | None) -> None:
        """The choice after `node`."""
        self._choices[node] = token, logprobs

    def go(self) -> bool:
        """Walk as far as choices are known; whether more are needed."""
        while self.walk.node in self._choices:
            token, logprobs = self._choices.pop(self.walk.node)
            if token is None:
                self.failed = True
                return False
            self.logprobs.append(logprobs)
            if not self.walk.step(token):
                return False
        return True


def walk_rows(
    rows: Sequence[RowPlan], logits: Tensor, outputs: Mapping[str, RequestOutput], sampler: Sampler
) -> list[RowWalk]:
    """The finished walks of `rows`, all of which need logits.

    `logits` [R, V] has those after the last known token and after each draft, row by row.
    """
    walks: list[RowWalk] = []
    first = 0
    for row in rows:
        walks.append(RowWalk(row, outputs[row.request.request_id], first))
        first += row.num_drafts + 1
    going = walks
    while going:
        asked = [(walk, node) for walk in going for node in walk.wanted()]
        places = [walk.place(node) for walk, node in asked]
        result = sampler.sample(
            logits if len(places) == len(logits) else logits[places], [walk.sample_row(node) for walk, node in asked]
        )
        for (walk, node), token, logprobs in zip(asked, result.tokens, result.logprobs, strict=True):
            walk.tell(node, token, logprobs)
        going = [walk for walk in going if walk.go()]
    return walks
