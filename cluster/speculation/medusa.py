"""Drafts by heads over the target's last hidden state, one head a position (Medusa, Cai et al. 2024).

The target's newest known token t was sampled from state H of the token before it. Head j was trained to guess, from H,
the token j + 1 places after t, so the first head yields the first draft. All heads read that one state: drafts don't
depend on each other but through penalties, and in a tree all nodes of a level have the same children. No KV, so nothing
is written, and reuse is that of the target alone. Built by the factory, called by the step loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.chain import Chain, DraftChooser, draft_chains
from cluster.speculation.draft_folder import read_draft_config
from cluster.speculation.draft_tensors import fill, read_draft_tensors
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.source import DraftSource
from cluster.speculation.tree import TreeShape, draft_trees

_WHAT = "Medusa heads"
# {head}.{layer}.linear.weight and .bias, {head}.{layers}.weight; some files put a name in front.
_TENSOR = re.compile(r"(?:medusa_heads?\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))")


class _Residual(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """The heads, each a stack of residual layers under a vocabulary head of its own; tensors named as published."""

    def __init__(self, heads: int, layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__(
            nn.Sequential(
                *(_Residual(hidden_size) for _ in range(layers)), nn.Linear(hidden_size, vocab_size, bias=False)
            )
            for _ in range(heads)
        )
        self.hidden_size, self.vocab_size = hidden_size, vocab_size

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, allow_pickle: bool = False) -> MedusaHeads:
        """The heads of the checkpoint in `folder`, ready for inference. Raises ModelLoadError if they are incomplete,
        or fewer than config.json says.

        The tensors decide how many heads there are: official files hold five where their configuration says two.
        """
        document = read_draft_config(folder)
        layers, least = (_count(folder, document, f"medusa_num_{what}") for what in ("layers", "heads"))
        read = read_draft_tensors(folder, allow_pickle=allow_pickle, wanted=lambda n: bool(_TENSOR.fullmatch(n)))
        tensors = {_plain_name(name): tensor for name, tensor in read.items()}
        heads = max(least, 1 + max((int(name.split(".")[0]) for name in tensors), default=0))
        output = tensors.get(f"0.{layers}.weight")
        if output is None or output.ndim != 2:
            raise ModelLoadError(
                f"The {_WHAT} in {folder} lack matrix 0.{layers}.weight, which turns states into logits: use a "
                "checkpoint whose medusa_num_layers is right."
            )
        with torch.device("meta"):
            module = cls(heads, layers, output.shape[1], output.shape[0])
        fill(module, tensors, _WHAT, folder)
        return module.to(dtype).eval().requires_grad_(False)

    def logits(self, hidden: Tensor, count: int) -> list[Tensor]:
        """Logits [R, V] float32 of each of the first `count` heads, for states [R, H]."""
        hidden = hidden.to(next(self.parameters()).dtype)
        return [head(hidden).float() for head in islice(self, count)]


def _count(folder: Path, document: dict[str, object], field: str) -> int:
    value = document.get(field, 1)
    if type(value) is not int or not 1 <= value <= 64:
        raise ModelLoadError(
            f"{field} in {folder}/config.json is {value!r}, but must be between 1 and 64: use a Medusa checkpoint."
        )
    return value


def _plain_name(name: str) -> str:
    match = _TENSOR.fullmatch(name)
    return match[1] if match else name


def build_medusa(source: DraftSource) -> MedusaDrafter:
    """The heads in the source's folder as a drafter. Raises ModelLoadError if they can't be loaded or don't fit."""
    target = source.target
    heads = MedusaHeads.load(source.folder, target.dtype, source.config.allow_pickle)
    source.check_hidden(_WHAT, heads.hidden_size, (target.num_layers,))
    source.check_rows(heads.vocab_size)
    return MedusaDrafter(heads.to(target.device), target.num_layers, source.sampler, source.max_drafts, source.tree)


class MedusaDrafter:
    """`hidden_layer` is the target's last hidden state, after its final norm. `sampler` is the target's.

    Drafts are chains of at most `max_drafts` tokens, or trees of that depth where `tree` says how wide they are.
    """

    method = SpeculationMethod.MEDUSA
    kv_layout: KvLayout | None = None

    def __init__(
        self, heads: MedusaHeads, hidden_layer: int, sampler: Sampler, max_drafts: int, tree: TreeShape | None = None
    ) -> None:
        self.hidden_layers = (hidden_layer,)
        most = min(max_drafts, len(heads))
        self.shape = DraftShape(coupling_of(self.method), draft_kv_lookahead(self.method), most)
        self._heads = heads
        self._tree = tree
        self._chooser = DraftChooser(sampler)

    def attach(self, kv: KvTensors) -> None:
        raise TypeError("Medusa heads have no KV")

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """Raises ValueError for a task whose newest state is missing."""
        asked = [_over_newest(task, self.shape.max_draft_tokens) for task in tasks]
        passes = _Heads(self._heads)
        if self._tree is None:
            return draft_chains(asked, self.shape, self._chooser, passes)
        return draft_trees(asked, self.shape, self._tree, self._chooser, passes)

    def forget(self, request_id: str) -> None:
        """Nothing is remembered about a request."""

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        return []


def _over_newest(task: DraftTask, most: int) -> DraftTask:
    """The task as chains and trees take it, where what is fed first is the newest token alone."""
    known = len(task.tokens)
    return replace(task, k=min(task.k, most), start=known - 1, end=known) if task.k else task


class _Heads:
    """One pass for each head, of which only the first computes anything from a state: all read the same."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._logits: list[Tensor] = []
        self._depth = 0
        self._tasks: list[int] = []

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        states = torch.stack([_newest_state(tasks[place]) for place in drafting])
        self._logits = self._heads.logits(states, max(tasks[place].k for place in drafting))
        self._tasks = list(range(len(drafting)))
        return self._logits[0]

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        return self._logits[len(chains[0].drafts)][[chain.place for chain in chains]]

    def grow(self, rows: Sequence[PagedRow], parents: Sequence[int]) -> Tensor:
        self._depth += 1
        self._tasks = [self._tasks[parent] for parent in parents]
        return self._logits[self._depth][self._tasks]


def _newest_state(task: DraftTask) -> Tensor:
    """[H], the state that the newest known token was sampled from."""
    if task.hidden is None or task.hidden_start + task.hidden.shape[0] != len(task.tokens) - 1:
        raise ValueError(f"{task.request_id} wants drafts, but lacks the hidden state before its newest token")
    return task.hidden[-1]
