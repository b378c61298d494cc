"""The finished head as a folder in the public "speculators" layout.

Owns: the config.json of an exported draft and the choice of what is saved. The embedding is the target's and is left
out, as loaders that know EAGLE3 (this one, vLLM) then take the target's own. Called by `cluster.training.train`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from cluster.speculation.eagle3_config import Eagle3Config
from cluster.speculation.eagle3_model import Eagle3Head


def export_head(head: Eagle3Head, folder: Path, target: PretrainedConfig, drafts: int, dtype: torch.dtype) -> None:
    """Writes `folder`/config.json and model.safetensors (weights in `dtype`), for chains of `drafts` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, head.target_ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = _document(head.config, target, drafts, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def _document(config: Eagle3Config, target: PretrainedConfig, drafts: int, dtype: str) -> dict[str, Any]:
    layer = config.layer
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": None, "architectures": list(target.architectures or [])},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "target_hidden_size": None if config.target_hidden_size == layer.hidden_size else config.target_hidden_size,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "embed_requires_grad": False,
        "dtype": dtype,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_attention_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "num_hidden_layers": layer.num_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": layer.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": layer.max_positions,
            "rope_parameters": layer.rope_parameters,
        },
    }
