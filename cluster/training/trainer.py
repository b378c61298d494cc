"""The training loop of a head over captured samples.

Owns: the loss, the optimizer and the rhythm of steps, checkpoints and held-out measurements. Invariant: a training
that was stopped and resumed takes the same steps as one that was not. Called by `cluster.training.train`.

The loss of draft step k is the cross-entropy against the target's distribution over the draft vocabulary (a soft
label), weighted 0.8^k; positions whose most likely token is outside that vocabulary teach nothing. Source: EAGLE-3,
section 3. Batches take turns at being unrolled 1, 2, ... `ttt_steps` steps deep: every chain needs its first draft,
few get to the last, and a shallow batch costs a third of a deep one.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import clip_grad_norm_

from cluster.training.capture import CapturedSamples
from cluster.training.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from cluster.training.evaluate import Acceptance, measure_acceptance
from cluster.training.options import TrainDraftOptions
from cluster.training.schedule import batches, learning_rate
from cluster.training.ttt import TrainableHead, TttBatch, ttt_steps

_STEP_DECAY = 0.8
_CLIP = 1.0
_SMOOTHING = 0.98


class Trainer:
    """Trains `head` on `data`; `output_matrix` [vocab, H] turns the target's last states into its logits."""

    def __init__(
        self,
        head: TrainableHead,
        data: CapturedSamples,
        held_out: CapturedSamples | None,
        output_matrix: Tensor,
        options: TrainDraftOptions,
        dtype: torch.dtype,
    ) -> None:
        self._head, self._data, self._held_out = head, data, held_out
        self._options, self._dtype = options, dtype
        ids = head.target_ids
        self._label_rows = (output_matrix if ids is None else output_matrix[ids]).to(dtype)
        self._drafted = torch.zeros(len(output_matrix), dtype=torch.bool)
        self._drafted[slice(None) if ids is None else ids] = True
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._checkpoint = options.work / "checkpoint.safetensors"
        self._curve = options.work / "curve.jsonl"

    def run(
        self, report: Callable[[TrainingState, Acceptance | None], None]
    ) -> tuple[TrainingState, Acceptance | None]:
        """Trains up to `token_passes`; `report` is called after every step, with the acceptance if one was measured."""
        options = self._options
        state = load_checkpoint(self._checkpoint, self._head, self._optimizer)
        order = itertools.islice(batches(self._data.lengths, options.batch_tokens, options.seed), state.steps, None)
        acceptance = None
        while state.passes < options.token_passes:
            before = state.passes // options.evaluate_every
            numbers = next(order)
            self._step(TttBatch.of([self._data[i] for i in numbers]), state)
            state.passes += sum(self._data.lengths[i] for i in numbers)
            state.steps += 1
            done = state.passes >= options.token_passes
            if done or state.passes // options.evaluate_every > before:
                acceptance = self._measure(state)
                save_checkpoint(self._checkpoint, self._head, self._optimizer, state)
                report(state, acceptance)
            else:
                report(state, None)
        return state, acceptance or self._measure(state)

    def _step(self, batch: TttBatch, state: TrainingState) -> None:
        rate = learning_rate(self._options.learning_rate, state.passes / self._options.token_passes)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        losses = self.losses(batch, depth=1 + state.steps % self._options.ttt_steps)
        self._optimizer.zero_grad(set_to_none=True)
        torch.stack([_STEP_DECAY**step * loss for step, loss in enumerate(losses)]).sum().backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self._head.parameters(), _CLIP)
        self._optimizer.step()
        first = losses[0].item()
        state.loss = first if state.loss is None else _SMOOTHING * state.loss + (1 - _SMOOTHING) * first

    def losses(self, batch: TttBatch, depth: int) -> list[Tensor]:
        """For each of `depth` draft steps its loss (a scalar), a mean over the learned rows."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            learned, targets = self._labels(batch)
            losses = []
            for step, feedback in enumerate(ttt_steps(self._head, batch, depth)):
                rows = learned.clone()
                rows[:, :step] = False  # no chain of this length begins before the first row
                logits = self._head.logits(feedback[rows]).float()
                total = cross_entropy(logits, targets[rows[learned]], reduction="sum")
                losses.append(total / learned.sum().clamp(min=1))
        return losses

    @torch.no_grad()
    def _labels(self, batch: TttBatch) -> tuple[Tensor, Tensor]:
        """Rows to learn from [B, T], and for each the target's distribution over the draft vocabulary."""
        learned = batch.learned & self._drafted[batch.labels]
        scores = linear(batch.label_states[learned].to(self._dtype), self._label_rows)
        return learned, (scores.float() / self._options.temperature).softmax(-1)

    def _measure(self, state: TrainingState) -> Acceptance | None:
        if self._held_out is None:
            return None
        self._head.train(False)
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            acceptance = measure_acceptance(self._head, self._held_out, self._options.ttt_steps)
        self._head.train()
        line = {
            "passes": state.passes,
            "loss": round(state.loss or 0.0, 4),
            "acceptance": round(acceptance.length, 4),
            "conditional": acceptance.conditional,
            "time": round(time.time()),
        }
        with Path(self._curve).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return acceptance
