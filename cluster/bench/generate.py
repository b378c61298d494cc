"""The peer: transformers' own `generate` on one left-padded batch, greedy, with its default attention and cache.

Called by the engine benchmark, on the same prompts and threads as the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Generate:
    """`model` in float32 on the CPU, or in its own type on a GPU, as the engine has it."""

    def __init__(self, model: Path) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = torch.float32 if self._device.type == "cpu" else "auto"
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(model, dtype=dtype, local_files_only=True, use_safetensors=True).to(self._device).eval()

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Seconds to generate `new_tokens` for each of `prompts`."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        start = time.perf_counter()
        self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start
