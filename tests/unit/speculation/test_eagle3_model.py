"""The EAGLE3 head: its arithmetic against a plain formula, its file format, its refusals."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelLoadError
from cluster.speculation.eagle3_config import Eagle3Config, default_aux_layer_ids
from cluster.speculation.eagle3_model import Eagle3Head
from tests.support.plain_attention import WholeSequence

CONFIG = Eagle3Config(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=60,
    draft_vocab_size=20,
    target_hidden_size=32,
    aux_layer_ids=(1, 2, 3),
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
DOCUMENT = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 20,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 60,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def embedding() -> Tensor:
    return torch.randn(60, 32, generator=torch.Generator().manual_seed(1))


def random_head(config: Eagle3Config = CONFIG) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(config, embedding())
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    head.d2t.copy_(2 * torch.arange(20))  # draft id i is target id 3 i
    head.t2d.zero_()[3 * torch.arange(20)] = True
    return head.requires_grad_(False)


def write(head: Eagle3Head, folder: Path, document: dict[str, object] = DOCUMENT) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def plain_forward(w: dict[str, Tensor], tokens: list[int], aux: Tensor, before_residual: bool) -> Tensor:
    """The head again, position by position and head by head, from the paper's formula."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * w[name]

    def rotate(x: Tensor, position: int) -> Tensor:
        turned = x.clone()
        for i in range(4):
            angle = position / 500.0 ** (2 * i / 8)
            turned[i] = x[i] * math.cos(angle) - x[i + 4] * math.sin(angle)
            turned[i + 4] = x[i + 4] * math.cos(angle) + x[i] * math.sin(angle)
        return turned

    layer = "layers.0."
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    outputs = []
    for position, token in enumerate(tokens):
        h = w["fc.weight"] @ aux[position]
        normed = norm(h, layer + "hidden_norm.weight")
        x = torch.cat([norm(embedding()[token], layer + "input_layernorm.weight"), normed])
        q, k, v = ((w[f"{layer}self_attn.{name}_proj.weight"] @ x).view(-1, 8) for name in "qkv")
        keys.append([rotate(part, position) for part in k])
        values.append(list(v))
        mixed = []
        for head in range(4):
            turned = rotate(q[head], position)
            scores = torch.stack([turned @ key[head // 2] for key in keys]) / math.sqrt(8)
            weights = scores.softmax(0)
            mixed.append(sum(weight * value[head // 2] for weight, value in zip(weights, values, strict=True)))
        h = (normed if before_residual else h) + w[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(h, layer + "post_attention_layernorm.weight")
        gate, up = w[layer + "mlp.gate_proj.weight"] @ y, w[layer + "mlp.up_proj.weight"] @ y
        outputs.append(h + w[layer + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
    return torch.stack(outputs)


@pytest.mark.parametrize("before_residual", [False, True])
def test_forward_is_the_formula(tmp_path: Path, before_residual: bool) -> None:
    tensors = write(random_head(), tmp_path, DOCUMENT | {"norm_before_residual": before_residual})
    head = Eagle3Head.load(tmp_path, embedding(), torch.float32)
    tokens, aux = [5, 3, 59, 5, 0], torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    feedback = head(torch.tensor(tokens), head.combine(aux), torch.arange(5), WholeSequence())
    torch.testing.assert_close(feedback, plain_forward(tensors, tokens, aux, before_residual), rtol=1e-4, atol=1e-5)
    normed = torch.nn.functional.rms_norm(feedback, (32,), tensors["norm.weight"], 1e-5)
    torch.testing.assert_close(head.logits(feedback), normed @ tensors["lm_head.weight"].T)


def test_draft_ids_are_offsets_into_the_targets_vocabulary(tmp_path: Path) -> None:
    write(random_head(), tmp_path)
    head = Eagle3Head.load(tmp_path, embedding(), torch.float32)
    assert head.to_target_ids(torch.tensor([[0, 1], [7, 19]])).tolist() == [[0, 3], [21, 57]]
    assert head.hidden_layers == (1, 2, 3)


def test_official_layout_loads_the_same(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path / "speculators")
    official = tmp_path / "official"
    official.mkdir()
    llama = DOCUMENT["transformer_layer_config"]
    assert isinstance(llama, dict)
    flat = {k: v for k, v in llama.items() if k != "rope_parameters"}
    (official / "config.json").write_text(json.dumps(flat | {"rope_theta": 500.0, "draft_vocab_size": 20}))
    save_file({k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}, official / "model.safetensors")
    ours = Eagle3Head.load(tmp_path / "speculators", embedding(), torch.float32)
    theirs = Eagle3Head.load(official, embedding(), torch.float32, target_layers=12)
    assert theirs.hidden_layers == (2, 6, 9)
    aux = torch.randn(3, 96)
    rows = torch.tensor([1, 2, 3]), torch.arange(3)
    assert torch.equal(
        ours(rows[0], ours.combine(aux), rows[1], WholeSequence()),
        theirs(rows[0], theirs.combine(aux), rows[1], WholeSequence()),
    )


def test_layer_output_indices_are_translated() -> None:
    document = {k: v for k, v in DOCUMENT.items() if k != "eagle_aux_hidden_state_layer_ids"}
    document["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    assert Eagle3Config.from_dict(document).aux_layer_ids == (2, 30, 58)


@pytest.mark.parametrize("layers", range(3, 40))
def test_default_aux_layers_exist_and_rise(layers: int) -> None:
    low, middle, high = default_aux_layer_ids(layers)
    assert 0 < low < middle < high <= layers


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        Eagle3Head.load(tmp_path, embedding(), torch.float32)


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"fc\.weight .*\(32, 64\).*\(32, 96\)"):
        Eagle3Head.load(tmp_path, embedding(), torch.float32)


def test_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    write(random_head(), tmp_path)
    with pytest.raises(ModelLoadError, match=r"\(60, 32\).*\(61, 32\)"):
        Eagle3Head.load(tmp_path, torch.zeros(61, 32), torch.float32)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["d2t"][19] = 41
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"d2t .* 60"):
        Eagle3Head.load(tmp_path, embedding(), torch.float32)


@pytest.mark.parametrize("break_it", ["no weights", "no config", "damaged config", "pickle only", "unknown flag"])
def test_unusable_folders_fail_in_one_sentence(tmp_path: Path, break_it: str) -> None:
    write(random_head(), tmp_path)
    if break_it in ("no weights", "pickle only"):
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    elif break_it == "no config":
        (tmp_path / "config.json").unlink()
    elif break_it == "damaged config":
        (tmp_path / "config.json").write_text('{"draft_vocab_size": 20}')
    else:
        (tmp_path / "config.json").write_text(json.dumps(DOCUMENT | {"norm_output": True}))
    with pytest.raises(ModelLoadError) as caught:
        Eagle3Head.load(tmp_path, embedding(), torch.float32)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_own_embedding_wins_over_the_targets(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["embed_tokens.weight"] = torch.ones(60, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    head = Eagle3Head.load(tmp_path, embedding(), torch.float32)
    assert torch.equal(head.target_embedding, torch.ones(60, 32))
