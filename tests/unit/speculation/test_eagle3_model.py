"""The EAGLE3 head: its arithmetic against a plain formula, and what is refused when a checkpoint is loaded."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelLoadError
from cluster.speculation.eagle3_config import Eagle3Config, default_aux_layer_ids
from cluster.speculation.eagle3_model import Eagle3Head
from tests.support.plain_attention import WholeSequence
from tests.unit.speculation.eagle3_checkpoints import DOCUMENT, borrowed, load, random_head, write


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
        x = torch.cat([norm(borrowed().embedding[token], layer + "input_layernorm.weight"), normed])
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
    head = load(tmp_path)
    tokens, aux = [5, 3, 59, 5, 0], torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    feedback = head(torch.tensor(tokens), head.combine(aux), torch.arange(5), WholeSequence())
    torch.testing.assert_close(feedback, plain_forward(tensors, tokens, aux, before_residual), rtol=1e-4, atol=1e-5)
    normed = torch.nn.functional.rms_norm(feedback, (32,), tensors["norm.weight"], 1e-5)
    torch.testing.assert_close(head.logits(feedback), normed @ tensors["lm_head.weight"].T)


def test_draft_ids_are_offsets_into_the_targets_vocabulary(tmp_path: Path) -> None:
    write(random_head(), tmp_path)
    head = load(tmp_path)
    assert head.target_ids[[0, 1, 7, 19]].tolist() == [0, 3, 21, 57]
    assert head.hidden_layers == (1, 2, 3)


@pytest.mark.parametrize("layers", range(3, 40))
def test_default_aux_layers_exist_and_rise(layers: int) -> None:
    low, middle, high = default_aux_layer_ids(layers)
    assert 0 < low < middle < high <= layers


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(folder) in message
    return message


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lacks tensor layers.0.mlp.up_proj.weight" in refusal(tmp_path)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    save_file(tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    assert "has tensor layers.0.self_attn.q_norm.weight" in refusal(tmp_path)


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "fc.weight" in (message := refusal(tmp_path)) and "(32, 64)" in message and "(32, 96)" in message


def test_wrong_type_is_named(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["fc.weight"] = torch.zeros(32, 96, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "fc.weight" in (message := refusal(tmp_path)) and "int8" in message


@pytest.mark.parametrize(("at", "offset"), [(19, 41), (0, -1), (1, -1)])
def test_ids_that_are_no_other_tokens_are_refused(tmp_path: Path, at: int, offset: int) -> None:
    """Beyond the vocabulary, below it, or one token for two ids."""
    tensors = write(random_head(), tmp_path)
    tensors["d2t"][at] = offset
    save_file(tensors, tmp_path / "model.safetensors")
    assert "d2t" in (message := refusal(tmp_path)) and "60" in message


@pytest.mark.parametrize("break_it", ["no weights", "no config", "damaged config", "pickle only", "unknown"])
def test_unusable_folders_fail_in_one_sentence(tmp_path: Path, break_it: str) -> None:
    write(random_head(), tmp_path)
    if break_it == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif break_it == "pickle only":
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    elif break_it == "no config":
        (tmp_path / "config.json").unlink()
    elif break_it == "damaged config":
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": "x"}')
    else:
        (tmp_path / "config.json").write_text(json.dumps(DOCUMENT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}))
    refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both set"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True, but must be False"),
        ({"eagle_config": {"use_aux_hidden_state": False}, "target_hidden_size": 48}, "hidden_size is 32"),
        ({"draft_vocab_size": 61}, "draft_vocab_size is 61, but must be at most vocab_size, 60"),
    ],
)
def test_variants_that_are_not_computed_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write(random_head(), tmp_path, DOCUMENT | changes)
    assert message in refusal(tmp_path, target_layers=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu, but must be silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5.0, "factor": 2.0}}, "rope_type is dynamic"),
        ({"rope_parameters": {"rope_type": "nope"}}, "rope_type is nope"),
        ({"model_type": "deepseek_v2"}, "model_type is deepseek_v2"),
        ({"num_key_value_heads": 3}, "num_attention_heads modulo num_key_value_heads is 1"),
        ({"hidden_size": "wide"}, "no llama configuration"),
    ],
)
def test_layers_that_are_not_computed_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    layer = DOCUMENT["transformer_layer_config"]
    assert isinstance(layer, dict)
    write(random_head(), tmp_path, DOCUMENT | {"transformer_layer_config": layer | changes})
    assert message in refusal(tmp_path)


def test_own_embedding_wins_over_the_targets(tmp_path: Path) -> None:
    tensors = write(random_head(), tmp_path)
    tensors["embed_tokens.weight"] = torch.ones(60, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).token_embedding, torch.ones(60, 32))
    tensors["embed_tokens.weight"] = torch.ones(61, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "(60, 32), but its own is (61, 32)" in refusal(tmp_path)


def test_the_embedding_of_a_wider_target_is_refused(tmp_path: Path) -> None:
    write(random_head(), tmp_path)
    wide = replace(borrowed(), embedding=torch.zeros(60, 48))
    with pytest.raises(ModelLoadError, match=r"\(60, 32\), but the target's is \(60, 48\)"):
        Eagle3Head.load(tmp_path, wide, torch.float32)


def test_an_output_matrix_is_borrowed_for_the_whole_vocabulary_only(tmp_path: Path) -> None:
    full: Eagle3Config = replace(random_head().config, draft_vocab_size=60)
    tensors = write(random_head(full), tmp_path, DOCUMENT | {"draft_vocab_size": 60})
    for name in ("lm_head.weight", "d2t"):
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).lm_head.weight, borrowed().output)
    assert load(tmp_path).target_ids.tolist() == list(range(60))
    layer = DOCUMENT["transformer_layer_config"]
    assert isinstance(layer, dict)
    tied = DOCUMENT | {"draft_vocab_size": 60, "transformer_layer_config": layer | {"tie_word_embeddings": True}}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    assert torch.equal(load(tmp_path).lm_head.weight, borrowed().embedding)
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT))
    assert "lacks tensor lm_head.weight, 20 rows of 32" in refusal(tmp_path)


def test_positions_keep_their_precision_in_half_the_bits() -> None:
    """Angles of far positions come from float32 frequencies, whatever the type of the weights."""
    head, positions = random_head(), torch.tensor([0, 1, 1999])
    exact = head.rotary(torch.zeros(1), positions)
    rough = head.to(torch.bfloat16).rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
    for half, full in zip(rough, exact, strict=True):
        assert torch.equal(half, full.to(torch.bfloat16))
