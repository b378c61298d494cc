"""The EAGLE-1/2 head: its arithmetic against transformers' own layer, its official layouts, its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle_model import EagleHead
from tests.support.plain_attention import WholeSequence
from tests.unit.speculation.eagle3_checkpoints import borrowed

TARGET_LAYERS = 5
DOCUMENT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 60,
}


def tensors(layers: int = 1, fc_bias: bool = False, qkv_bias: bool = False) -> dict[str, Tensor]:
    """A random head under the names of the official files."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"fc.weight": (32, 64)} | ({"fc.bias": (32,)} if fc_bias else {})
    for i in range(layers):
        projections = {"q": 32, "k": 16, "v": 16}
        shapes |= {f"layers.{i}.self_attn.{name}_proj.weight": (rows, 32) for name, rows in projections.items()}
        if qkv_bias:
            shapes |= {f"layers.{i}.self_attn.{name}_proj.bias": (rows,) for name, rows in projections.items()}
        shapes |= {f"layers.{i}.self_attn.o_proj.weight": (32, 32), f"layers.{i}.mlp.down_proj.weight": (32, 48)}
        shapes |= {f"layers.{i}.mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
        shapes |= {f"layers.{i}.post_attention_layernorm.weight": (32,)}
        shapes |= {f"layers.{i}.input_layernorm.weight": (32,)} if i else {}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, Tensor], pickled: bool = False, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(DOCUMENT | changes))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


def load(folder: Path, lent: BorrowedWeights | None = None, allow_pickle: bool = False) -> EagleHead:
    return EagleHead.load(folder, lent or borrowed(), torch.float32, TARGET_LAYERS, allow_pickle)


def drafted(head: EagleHead) -> tuple[Tensor, Tensor]:
    """Logits of a pass over real states, and of one that is fed its own outputs."""
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))
    feedback = head(torch.tensor([1, 7, 59, 7, 0, 3]), head.combine(states), torch.arange(6), WholeSequence())
    again = head(torch.tensor([7, 59, 7, 0, 3, 9]), feedback, torch.arange(6) + 1, WholeSequence())
    return head.logits(feedback), head.logits(again)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_head_is_fc_and_layers_of_transformers_without_the_first_norm(tmp_path: Path, layers: int) -> None:
    weights = tensors(layers)
    write(tmp_path, weights, num_hidden_layers=layers)
    config = LlamaConfig(**DOCUMENT, attn_implementation="eager")
    states, ids = torch.randn(1, 6, 32), torch.tensor([[1, 7, 59, 7, 0, 3]])
    hidden = torch.cat([borrowed().embedding[ids], states], dim=-1) @ weights["fc.weight"].T
    rotation = LlamaRotaryEmbedding(config)(hidden, torch.arange(6)[None])
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    for i in range(layers):
        layer = LlamaDecoderLayer(config, i)
        own = {name.removeprefix(f"layers.{i}."): t for name, t in weights.items() if name.startswith(f"layers.{i}.")}
        layer.load_state_dict({"input_layernorm.weight": torch.ones(32)} | own)
        if i == 0:
            layer.input_layernorm = torch.nn.Identity()
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation)
    head = load(tmp_path)
    feedback = head(ids[0], head.combine(states[0]), torch.arange(6), WholeSequence())
    torch.testing.assert_close(feedback, hidden[0].detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head.logits(feedback), hidden[0].detach() @ borrowed().output.T, atol=1e-4, rtol=1e-4)
    assert head.hidden_layers == (TARGET_LAYERS,) and head.max_positions == 128


def same(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights


LAYOUTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "official": (same, {}),
    "with its own matrices": (
        lambda weights: weights | {"embed_tokens.weight": borrowed().embedding, "lm_head.weight": borrowed().output},
        {},
    ),
    "sglang": (same, {"architectures": ["LlamaForCausalLMEagle"]}),
    "under model.": (
        lambda weights: {f"model.{name}": tensor for name, tensor in weights.items()},
        {"architectures": ["EagleLlamaForCausalLM"]},
    ),
    "with frequencies": (lambda weights: weights | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, {}),
}


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_loads_to_the_same_head(name: str, pickled: bool, tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    write(tmp_path / "reference", tensors())
    change, document = LAYOUTS[name]
    write(tmp_path, change(tensors()), pickled, **document)
    for ours, theirs in zip(
        drafted(load(tmp_path, allow_pickle=pickled)), drafted(load(tmp_path / "reference")), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("changes", [{"bias": True}, {"bias": None}])
def test_biases_are_read_where_the_official_code_has_them(changes: dict[str, Any], tmp_path: Path) -> None:
    """`fc` has one unless the document says otherwise; Qwen2's queries, keys and values have theirs."""
    weights = tensors(fc_bias=True, qkv_bias=True)
    write(tmp_path, weights, qkv_bias=True)
    document = {name: value for name, value in (DOCUMENT | {"qkv_bias": True} | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(document))
    head = load(tmp_path)
    assert torch.equal(head.state_dict()["fc.bias"], weights["fc.bias"])
    for name in "qkv":
        key = f"layers.0.self_attn.{name}_proj.bias"
        assert torch.equal(head.state_dict()[key], weights[key])


def test_matrices_of_a_padded_target_serve_too(tmp_path: Path) -> None:
    """A target's rows beyond the vocabulary mean nothing, and the sampler leaves them out."""
    write(tmp_path, tensors())
    padded = BorrowedWeights(
        *(torch.cat([matrix, torch.ones(4, 32)]) for matrix in (borrowed().embedding, borrowed().output))
    )
    for wide, narrow in zip(drafted(load(tmp_path, padded)), drafted(load(tmp_path)), strict=True):
        torch.testing.assert_close(wide[:, :60], narrow)


@pytest.mark.parametrize(
    ("broken", "changes", "message"),
    [
        ({"fc.weight": None}, {}, "lacks tensor fc.weight"),
        ({"norm.weight": torch.ones(32)}, {}, "has tensor norm.weight"),
        ({"fc.weight": torch.ones(32, 96)}, {}, r"fc.weight .* \(32, 96\), but config.json asks for \(32, 64\)"),
        ({"embed_tokens.weight": torch.ones(61, 32)}, {}, r"\(60, 32\), but its own is \(61, 32\)"),
        ({}, {"bias": True}, "lacks tensor fc.bias"),
        ({}, {"draft_vocab_size": 20}, "holds an EAGLE3 head, but the method is eagle: set it to eagle3"),
        ({}, {"architectures": ["EagleCohereForCausalLM"]}, "EagleCohereForCausalLM"),
        ({}, {"hidden_size": 64}, r"embed_tokens.weight of shape \(60, 64\), but the target's is \(60, 32\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    broken: dict[str, Tensor | None], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    weights = {name: tensor for name, tensor in (tensors() | broken).items() if tensor is not None}
    write(tmp_path, weights, **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".") and str(tmp_path) in str(caught.value)
