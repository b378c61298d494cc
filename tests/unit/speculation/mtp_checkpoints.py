"""Small random checkpoints in the public MTP layouts, and what their layers compute, written out with transformers'
own layers and eager attention.

A family's model of `TARGET + MTP` layers is made; its last layers become the decoder layers of MTP layers, under the
names that the family publishes them with.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TARGET, MTP, WIDTH, VOCAB = 2, 2, 32, 64

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DEEPSEEK = {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """`published` gives the names of a layer's surroundings, by their common names; `block` where its decoder layer
    lies; both for layer k of a target with TARGET layers."""

    architecture: str
    options: Mapping[str, Any]
    published: Callable[[int], dict[str, str]]
    block: Callable[[int], str]
    renames: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None
    norm_after: bool = True
    shared: bool = False
    own_head: bool = False
    hidden_first: bool = False
    types: Callable[[int], dict[str, Any]] = lambda layers: {}


def _deepseek(k: int) -> dict[str, str]:
    here = f"model.layers.{TARGET + k}."
    return {
        "enorm": f"{here}enorm.weight", "hnorm": f"{here}hnorm.weight", "eh_proj": f"{here}eh_proj.weight",
        "norm": f"{here}shared_head.norm.weight", "head": f"{here}shared_head.head.weight",
        "embedding": f"{here}embed_tokens.weight",
    }  # fmt: skip


def _step(name: str) -> str:
    return name.replace(".shared_head.", ".transformer.shared_head.").replace(".head.", ".output.")


def _qwen(k: int) -> dict[str, str]:
    return {
        "enorm": "mtp.pre_fc_norm_embedding.weight", "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj": "mtp.fc.weight", "norm": "mtp.norm.weight",
    }  # fmt: skip


FAMILIES = {
    "deepseek_v3": Family(
        "deepseek_v3", {**_EXPERTS, **_DEEPSEEK, **_MLA}, _deepseek, lambda k: f"model.layers.{TARGET + k}.",
    ),
    "glm4_moe": Family(
        "glm4_moe", {**_EXPERTS, **_DEEPSEEK, "head_dim": 8}, _deepseek, lambda k: f"model.layers.{TARGET + k}.",
        own_head=True,
    ),
    "glm4_moe_lite": Family(
        "glm4_moe_lite", {**_EXPERTS, **_DEEPSEEK, **_MLA}, _deepseek, lambda k: f"model.layers.{TARGET + k}.",
        types=lambda layers: {"mlp_layer_types": ["dense", *["sparse"] * (layers - 1)]},
    ),
    "step3p5": Family(  # transformers has its layers, but no causal language model of them: the names, around another's
        "qwen2", {}, lambda k: {common: _step(name) for common, name in _deepseek(k).items() if common != "embedding"},
        lambda k: f"model.layers.{TARGET + k}.",
        own_head=True,
    ),
    "qwen3_5": Family(
        "qwen3_5_text", {"head_dim": 8}, _qwen, lambda k: f"mtp.layers.{k}.",
        shared=True,
        types=lambda layers: {"layer_types": ["full_attention"] * layers},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {**_EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16},
        _qwen,
        lambda k: f"mtp.layers.{k}.",
        shared=True,
        types=lambda layers: {"layer_types": ["full_attention"] * layers},
    ),
    "mimo": Family(
        "qwen2", {},
        lambda k: {
            "enorm": f"model.mtp_layers.{k}.token_layernorm.weight",
            "hnorm": f"model.mtp_layers.{k}.hidden_layernorm.weight",
            "eh_proj": f"model.mtp_layers.{k}.input_proj.weight",
            "norm": f"model.mtp_layers.{k}.final_layernorm.weight",
        },
        lambda k: f"model.mtp_layers.{k}.",
        model_type="mimo",
        hidden_first=True,
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash", {**_EXPERTS, "head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "sliding_window": 4},
        lambda k: {
            "enorm": f"model.mtp.layers.{k}.enorm.weight", "hnorm": f"model.mtp.layers.{k}.hnorm.weight",
            "eh_proj": f"model.mtp.layers.{k}.eh_proj.weight", "norm": f"model.mtp.layers.{k}.final_layernorm.weight",
        },
        lambda k: f"model.mtp.layers.{k}.",
        renames={"post_attention_layernorm.": "pre_mlp_layernorm."},
        types=lambda layers: {
            "layer_types": ["full_attention", *["sliding_attention"] * (layers - 1)],
            "mlp_layer_types": ["dense"] * layers,
        },
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {"moe_intermediate_size": 16, "head_dim": 8, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1},
        lambda k: {
            "enorm": f"model.mtp_emb_norm.{k}.weight", "hnorm": f"model.mtp_hidden_norm.{k}.weight",
            "eh_proj": f"model.mtp_linear_proj.{k}.weight",
        },
        lambda k: f"model.mtp_block.{k}.",
        norm_after=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A folder in a public layout, and the parts that it was made of: `model` has all layers, `parts[k]` what lies
    around MTP layer k, by common names."""

    folder: Path
    family: Family
    model: Any
    parts: list[dict[str, Tensor]]

    def reference(self, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        """Logits [T - MTP, V] of each MTP layer; `hidden` [T, H] are the target's last states of `tokens` [T]."""
        slots = len(tokens) - MTP
        positions = torch.arange(slots)[None]
        decoder, state, found = self.model.get_decoder(), hidden[:slots], []
        for k, part in enumerate(self.parts):
            norm = lambda x, name, part=part: _norm(decoder, part[name])(x)  # noqa: E731
            embedded = part["embedding"][tokens[1 + k : 1 + k + slots]]
            joined = torch.cat([norm(embedded, "enorm"), norm(state, "hnorm")], dim=-1) @ part["eh_proj"].T
            kinds = getattr(self.model.config, "layer_types", None)
            by_type = "full_attention" in (self.model.config.rope_parameters or {})
            kind = {"layer_type": kinds[TARGET + k]} if by_type else {}
            angles = decoder.rotary_emb(joined[None], positions, **kind)
            window = self.model.config.sliding_window if kinds and kinds[TARGET + k] == "sliding_attention" else slots
            output = decoder.layers[TARGET + k](
                joined[None], attention_mask=_mask(slots, window), position_embeddings=angles, position_ids=positions
            )
            state = (output[0] if isinstance(output, tuple) else output)[0]
            state = norm(state, "norm") if self.family.norm_after else state
            found.append(state @ part["head"].T)
        return found


def build(name: str, folder: Path, **changes: Any) -> Checkpoint:
    """A checkpoint of the family, made of random weights. `changes` are of the family's fields."""
    family, generator = replace(FAMILIES[name], **changes), torch.Generator().manual_seed(7)
    model = _model(family, TARGET + MTP)
    for parameter in model.parameters():
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else 0.1 * noise + parameter)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    parts = []
    for k in range(MTP):
        parts.append(_surroundings(family, tensors, parts, generator))
        _publish(family, k, parts[-1], tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _model(family, TARGET).config.save_pretrained(folder)
    if family.model_type:
        _rename_type(folder, family.model_type)
    return Checkpoint(folder, family, model.eval().requires_grad_(False), parts)


def _model(family: Family, layers: int) -> Any:
    fields = {**_COMMON, **family.options, **family.types(layers), "num_hidden_layers": layers}
    if family.architecture == "ernie4_5_moe":
        fields["moe_layer_end_index"] = layers - 1
    config = CONFIG_MAPPING[family.architecture](**fields, attn_implementation="eager")
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return architecture(config)


def _surroundings(
    family: Family, tensors: Mapping[str, Tensor], before: list[dict[str, Tensor]], generator: torch.Generator
) -> dict[str, Tensor]:
    part = {name: 0.2 * torch.randn(WIDTH, generator=generator) + 1 for name in ("enorm", "hnorm", "norm")}
    part["eh_proj"] = 0.2 * torch.randn(WIDTH, 2 * WIDTH, generator=generator)
    if family.shared and before:
        part = dict(before[0])
    part["embedding"] = tensors["model.embed_tokens.weight"]
    own = 0.2 * torch.randn(VOCAB, WIDTH, generator=generator)
    part["head"] = own if family.own_head else tensors["lm_head.weight"]
    return part


def _publish(family: Family, k: int, part: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> None:
    here = f"model.layers.{TARGET + k}."
    for name in [name for name in tensors if name.startswith(here)]:
        rest = name.removeprefix(here)
        if family.block(k) + rest == name:
            continue
        for ours, theirs in family.renames.items():
            rest = rest.replace(ours, theirs)
        tensors[family.block(k) + rest] = tensors.pop(name)
    for common, name in family.published(k).items():
        tensor = part[common]
        if common == "eh_proj" and family.hidden_first:
            tensor = torch.cat([tensor[:, WIDTH:], tensor[:, :WIDTH]], dim=1)
        tensors[name] = tensor.clone()


def _rename_type(folder: Path, model_type: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))


def _mask(length: int, window: int) -> Tensor:
    ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
    return torch.zeros(length, length).masked_fill((ahead > 0) | (ahead <= -window), -torch.inf)[None, None]


def _norm(decoder: Any, weight: Tensor) -> Any:
    norm = type(decoder.norm)(WIDTH, eps=decoder.config.rms_norm_eps)
    norm.weight.data = weight
    return norm
