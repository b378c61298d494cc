"""Which of the slots that a group of rows reads its queries see: causal order, sliding windows, and rows with layouts.

Invariant: what isn't hidden here is a slot of the row's own sequence that its token may attend to; padding and whatever
lies past a row's last slot is always hidden. Called by the attention backends, once a step for each window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.engine.batch import RowExtent


def hidden_slots(
    rows: Sequence[RowExtent], starts: Sequence[int], read: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [rows, queries, read]: what each query of `rows`, all of one length, doesn't see.

    Row r reads its slots [starts[r], starts[r] + read), all of its layout among them. `window` counts the positions
    that a query sees, itself included.
    """
    at = torch.tensor([row.start for row in rows], device=device)[:, None, None]
    at = at + torch.arange(rows[0].length, device=device)[:, None]
    seen = torch.tensor(starts, device=device)[:, None, None] + torch.arange(read, device=device)
    hidden = seen > at
    for index, (row, first) in enumerate(zip(rows, starts, strict=True)):
        if row.hole:  # from here on, positions
            at[index] += len(row.hole)
            seen[index, 0, max(0, row.hole.start - first) :] += len(row.hole)
        if row.layout is not None:
            end = row.context - first
            positions = torch.tensor(row.layout.positions, device=device)
            laid_out = slice(end - len(positions), end)
            hidden[index, :, laid_out] = ~row.layout.visible.to(device)
            at[index, :, 0] = positions[-row.length :]
            seen[index, 0, laid_out] = positions
    if window is not None:
        hidden |= seen <= at - window
    return hidden
