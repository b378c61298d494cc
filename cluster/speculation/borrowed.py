"""What a head may borrow of its target: the embedding and the output matrix, which heads seldom have of their own.

Invariant: nothing is copied unless the types differ. Made by the modes' builders and by the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class BorrowedWeights:
    """`embedding` and `output`, both [vocabulary, hidden]: a token's vector, and what turns last states into logits."""

    embedding: Tensor
    output: Tensor

    @classmethod
    def of(cls, target: PreTrainedModel, dtype: torch.dtype | None = None) -> BorrowedWeights:
        """Those of `target`, in `dtype` if it is given."""
        embedding: Any = target.get_input_embeddings()
        output: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        return cls(*(layer.weight.detach().to(dtype or layer.weight.dtype) for layer in (embedding, output)))
