"""Loading a decoder-only transformers model from a local folder of safetensors.

Nothing is downloaded, no code from the folder is run and no pickle is read: a folder that would need any of that is
refused with one sentence that says what to do. What comes back has passed the gate (`cluster.engine.gate`), so its
attention really is ours. Called by `Engine` for the target and by drafters for an independent draft.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from cluster.engine.attention import TANDEM_PAGED
from cluster.engine.gate import check_and_measure, check_flag
from cluster.engine.kv_tensors import KvLayout
from cluster.engine.model_folder import fingerprint, read_config, weight_files
from cluster.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the gate. `max_positions` is None where the model states no limit."""

    model: PreTrainedModel
    config: PreTrainedConfig
    layout: KvLayout
    fingerprint: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_positions: int | None
    hidden_size: int
    num_layers: int
    device: torch.device
    dtype: torch.dtype


def load_target(path: Path, dtype: str = "auto", device: torch.device | None = None) -> LoadedModel:
    """Load and check the model in `path`. `dtype` "auto" is float32 on a CPU and the model's own elsewhere.

    Raises ModelLoadError with one sentence for every reason not to serve the folder.
    """
    device = device or torch.device("cpu")
    identity = fingerprint(read_config(path), weight_files(path))
    model = _load(path, resolve_dtype(dtype, device), device)
    if device.type == "cpu":
        lay_out_for_small_batches(model)
    return describe(model, identity, generation_eos(path))


def describe(model: PreTrainedModel, identity: str, eos_ids: tuple[int, ...] = ()) -> LoadedModel:
    """Pass `model` (on its device, `eval`, attention set to ours) through the gate, and describe it."""
    layout = check_and_measure(model)
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return LoadedModel(
        model=model,
        config=config,
        layout=layout,
        fingerprint=identity,
        vocab_size=config.vocab_size,
        eos_ids=eos_ids or _as_ids(config.eos_token_id),
        max_positions=positions,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        device=model.device,
        dtype=model.dtype,
    )


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The torch type of a configured name; "auto" is left to the checkpoint except on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelLoadError(f"dtype is {name}, but must be auto, float32, bfloat16 or float16: choose one of them.")
    return dtype


def _load(path: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    try:
        # Before the weights are read: some architectures that lack the flag can't even be built with our attention.
        check_flag(MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(path, local_files_only=True))])
        load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned the class of the factory
        model, info = load(
            path,
            dtype=dtype,
            attn_implementation=TANDEM_PAGED,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises whatever the folder makes it stumble over
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ModelLoadError(
            f"{path} can't be loaded as a causal language model ({reason}): check the folder."
        ) from error
    lacking = sorted({*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])})
    if lacking:
        raise ModelLoadError(
            f"{path} lacks {len(lacking)} weights of its architecture ({', '.join(lacking[:3])}): "
            "fetch or convert it again."
        )
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def lay_out_for_small_batches(model: PreTrainedModel) -> None:
    """Store the weights of linear layers column by column; their values and shapes stay.

    A product of a few rows with a matrix is bound by how the matrix is walked: MKL takes 1.3 to 2.3 times as long for
    8 rows when it is stored as checkpoints store it.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def generation_eos(path: Path) -> tuple[int, ...]:
    """End-of-sequence ids of `generation_config.json`, which override the model configuration's; () if it has none."""
    try:
        content = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return _as_ids(content.get("eos_token_id")) if isinstance(content, dict) else ()


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
