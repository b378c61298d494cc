"""The GGUF converter: a small file written with the gguf package must come out as the same model."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cluster.errors import ModelLoadError
from cluster.models.gguf import convert_gguf

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES, "he", "hel"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # the folder keeps bfloat16, so that is what the file starts from
        parameter.copy_(parameter.to(torch.bfloat16))
    return model


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's own converter does to q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: LlamaForCausalLM, architecture: str = "llama", pre: str = "smollm", quantize: bool = False
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = llama_cpp_order(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            kind = None
            if quantize and weight.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q4_1
                weight = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_converted_model_computes_the_same_logits(tmp_path: Path, original: LlamaForCausalLM) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", original), tmp_path / "model")
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    ids = torch.arange(40).unsqueeze(0)
    torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_quantized_weights_come_out_near_the_original(tmp_path: Path, original: LlamaForCausalLM) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", original, quantize=True), tmp_path / "model")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name, weight in original.model.layers[1].named_parameters():
            stored = file.get_tensor(f"model.layers.1.{name}")
            # Four bits over a block of 32 values: half a step of a range of some 5 standard deviations.
            assert (stored - weight).abs().max() < 0.25 * weight.std().nan_to_num(1.0) + 1e-6


def test_tokenizer_and_template_are_the_files(tmp_path: Path, original: LlamaForCausalLM) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", original), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.tokenize("hell 42") == ["hel", "l", "Ġ", "4", "2"]
    text = "hé 日本 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_converting_again_changes_nothing_and_another_file_replaces_it(
    tmp_path: Path, original: LlamaForCausalLM
) -> None:
    source = write_gguf(tmp_path / "model.gguf", original)
    folder = convert_gguf(source, tmp_path / "model")
    first = (folder / "model.safetensors").stat().st_ino
    assert (convert_gguf(source, folder) / "model.safetensors").stat().st_ino == first
    (folder / "stale").touch()
    quantized = write_gguf(tmp_path / "other.gguf", original, quantize=True)
    assert (convert_gguf(quantized, folder) / "model.safetensors").stat().st_ino != first
    assert not (folder / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf", "other.gguf"]


def test_a_folder_without_marker_is_converted_again(tmp_path: Path, original: LlamaForCausalLM) -> None:
    source, folder = write_gguf(tmp_path / "model.gguf", original), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert json.loads((convert_gguf(source, folder) / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, model: path, "does not exist"),
        (lambda path, model: path.write_bytes(b"not a model") and path, "not a readable GGUF"),
        (lambda path, model: write_gguf(path, model, architecture="gpt2"), "general.architecture is 'gpt2'"),
        (lambda path, model: write_gguf(path, model, pre="llama-bpe"), "gpt2/llama-bpe"),
    ],
    ids=["missing", "damaged", "architecture", "tokenizer"],
)
def test_unusable_files_fail_and_leave_nothing(tmp_path: Path, original: LlamaForCausalLM, make, message) -> None:  # type: ignore[no-untyped-def]
    source = make(tmp_path / "model.gguf", original)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf(source, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir() if path != source] == []
