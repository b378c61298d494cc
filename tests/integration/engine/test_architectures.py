"""The gate: a dozen architectures are served, and what can't be served faithfully is refused in one sentence.

Tiny random models, written to a folder and loaded as a user's would be.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cluster.engine.attention import TANDEM_PAGED
from cluster.engine.gate import check_and_measure
from cluster.engine.kv_tensors import LayerKv
from cluster.engine.model import load_target
from cluster.errors import ModelLoadError

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_NAMES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {},
    "gpt2": GPT2_NAMES,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": {},
    "cohere2": {"sliding_window": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16,
        "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip
REFUSED = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3},
    "mamba": {},
    "qwen3_next": {},
    "recurrent_gemma": {"head_dim": 8},
    "llama4_text": {},
    "bert": {},
}


def random_model(kind: str, implementation: str, **options: Any) -> PreTrainedModel:
    """Weights large enough that attention matters to the logits."""
    config = AutoConfig.for_model(kind, **{**SMALL, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.1)
    return model


def save(kind: str, folder: Path, implementation: str = "eager", **options: Any) -> Path:
    random_model(kind, implementation, **options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", SERVED)
def test_served(kind: str, tmp_path: Path) -> None:
    loaded = load_target(save(kind, tmp_path, **SERVED[kind]))
    assert len(loaded.layout.layers) == loaded.num_layers == 3
    assert loaded.vocab_size == 97
    assert loaded.eos_ids == (2,)
    assert loaded.max_positions == 256


def test_layout_comes_from_what_attention_stores(tmp_path: Path) -> None:
    """Expanded MLA has keys wider than values; grouped queries store fewer heads than they ask with."""
    assert load_target(save("deepseek_v3", tmp_path / "d", **SERVED["deepseek_v3"])).layout.layers[0] == LayerKv(
        4, 16, 8
    )
    assert load_target(save("llama", tmp_path / "l")).layout.layers[0] == LayerKv(2, 8, 8)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"use a decoder-only model with full or sliding-window attention\.$"):
        load_target(save(kind, tmp_path, **REFUSED[kind]))


def test_attention_that_is_not_ours_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has the flag but computes something else in its own attention fails the comparison with eager."""
    model = random_model("llama", TANDEM_PAGED)
    for layer in model.model.layers:
        project = layer.self_attn.o_proj
        monkeypatch.setattr(project, "forward", lambda x, p=project: torch.nn.functional.linear(x.roll(1, 1), p.weight))
    with pytest.raises(ModelLoadError, match="differs from its own eager forward"):
        check_and_measure(model)


def test_layers_that_skip_the_function_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", TANDEM_PAGED)
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(ModelLoadError, match=r"once for each of its layers"):
        check_and_measure(model)


def test_missing_folder() -> None:
    with pytest.raises(ModelLoadError, match="must be an existing folder"):
        load_target(Path("/nowhere/at/all"))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no readable config\.json"):
        load_target(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04]q\x00.")
    with pytest.raises(
        ModelLoadError, match=r"pickled weights, which are never read.*convert the weights to safetensors"
    ):
        load_target(tmp_path)


def test_code_from_the_folder_is_not_run(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran code from the folder')")
    with pytest.raises(ModelLoadError, match="auto_map"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"\x0e\x00\x00\x00\x00\x00\x00\x00{broken json {"], ids=["empty", "noise", "json"]
)
def test_damaged_weights(tmp_path: Path, content: bytes) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a valid safetensors file"):
        load_target(tmp_path)


def test_incomplete_weights_are_not_filled_up_with_random_ones(tmp_path: Path) -> None:
    model = random_model("llama", "eager")
    model.save_pretrained(tmp_path)
    weights = {n: t.clone() for n, t in model.state_dict().items() if "layers.1.mlp" not in n}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks 3 weights"):
        load_target(tmp_path)


def test_fingerprint_tells_fine_tunes_apart_and_knows_a_copy(tmp_path: Path) -> None:
    first, copy, tuned = tmp_path / "first", tmp_path / "copy", tmp_path / "tuned"
    model = random_model("llama", "eager")
    model.save_pretrained(first)
    model.save_pretrained(copy)
    model.model.layers[2].mlp.up_proj.weight.add_(1e-3)
    model.save_pretrained(tuned)
    assert load_target(first).fingerprint == load_target(copy).fingerprint
    assert load_target(first).fingerprint != load_target(tuned).fingerprint


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype is int8"):
        load_target(save("llama", tmp_path), dtype="int8")


def test_sixteen_bit_weights_pass_the_gate(tmp_path: Path) -> None:
    assert load_target(save("llama", tmp_path), dtype="bfloat16").layout.dtype == torch.bfloat16
