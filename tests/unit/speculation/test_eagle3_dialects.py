"""Every public dialect of EAGLE3 checkpoints loads to the same head: same tensors, same states read, same drafts.

The documents are those that the dialects publish, but for sizes. What the heads compute is compared with code of
others in `test_eagle3_peer`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ModelLoadError
from cluster.speculation.eagle3_config import Eagle3Config
from cluster.speculation.eagle3_dialects import LayerCount
from cluster.speculation.eagle3_model import Eagle3Head
from tests.support.plain_attention import WholeSequence
from tests.unit.speculation.eagle3_checkpoints import CONFIG, LAYER, load, random_head

TARGET_LAYERS = 32
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
}
LLAMA = SIZES | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
    "use_cache": True,
}
OFFICIAL = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "draft_vocab_size": 20,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
    "next_layer_regular": True,
    "parallel_draft_heads_num_layers": 1,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
SPECFORGE = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 20,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
ANGELSLIM = LLAMA | {
    "architectures": ["Eagle3LlamaForCausalLM"],
    "draft_vocab_size": 20,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_hidden_layers": 28,  # the target's: the draft has one layer all the same
    "rope_theta": 500.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
REDHAT = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 20,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0",
    "target_hidden_size": None,
    "transformer_layer_config": LLAMA | {"head_dim": 8, "rope_theta": 500.0, "max_position_embeddings": 4096},
}
# Three states of a target of 32 layers: the ones before layers 2, 16 and 29, whichever way they are counted.
BASE = replace(CONFIG, aux_layer_ids=(2, 16, 29))


def shape(**changes: Any) -> Any:
    return replace(LAYER, **({"max_positions": 4096} | changes))


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 500.0} | parameters


@dataclass(frozen=True)
class Case:
    """A published `document`, and the head it means. `rename` makes the dialect's tensor names of ours."""

    document: dict[str, Any]
    config: Eagle3Config
    rename: Callable[[str], str] = lambda name: name
    pickled: bool = False
    own_embedding: bool = False


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def aux_norms(name: str) -> str:
    for ours, theirs in zip(("fc_norm.0", "fc_norm.1", "fc_norm.2"), ("low", "mid", "high"), strict=True):
        name = name.replace(ours, f"aux_norm_{theirs}")
    return midlayer(name)


CASES = {
    "official": Case(
        OFFICIAL,
        replace(BASE, layer=shape(max_positions=2048, rope_parameters=rope(rope_theta=10000.0))),
        midlayer,
        pickled=True,
    ),
    "official, of a wider target": Case(
        OFFICIAL | {"target_hidden_size": 48},
        replace(
            BASE,
            layer=shape(max_positions=2048, rope_parameters=rope(rope_theta=10000.0)),
            target_hidden_size=48,
        ),
        midlayer,
        pickled=True,
        own_embedding=True,
    ),
    "modelopt": Case(
        SPECFORGE | {"eagle_config": EAGLE_CONFIG, "rope_scaling": LLAMA3_ROPE},
        replace(BASE, layer=shape(rope_parameters=rope(**LLAMA3_ROPE))),
    ),
    "modelopt, of the last state": Case(
        SPECFORGE | {"eagle_config": EAGLE_CONFIG | {"use_aux_hidden_state": False}},
        replace(BASE, layer=shape(), aux_layer_ids=(TARGET_LAYERS,), projects=False),
    ),
    "modelopt, without a last norm": Case(
        SPECFORGE | {"eagle_config": EAGLE_CONFIG | {"use_last_layernorm": False}},
        replace(BASE, layer=shape(), final_norm=False),
    ),
    "nemo": Case(SPECFORGE | {"eagle_config": EAGLE_CONFIG}, replace(BASE, layer=shape()), "model.{}".format),
    "specforge": Case(SPECFORGE, replace(BASE, layer=shape()), midlayer),
    "specforge 3.1": Case(
        SPECFORGE | {"fc_norm": True, "norm_output": True},
        replace(BASE, layer=shape(), fc_norm=True, norm_output=True),
        midlayer,
    ),
    "sglang's older names": Case(
        SPECFORGE | {"use_aux_norm": True},
        replace(BASE, layer=shape(), fc_norm=True),
        aux_norms,
    ),
    "wide heads": Case(SPECFORGE | {"head_dim": 16}, replace(BASE, layer=shape(head_dim=16)), midlayer),
    "angelslim": Case(
        ANGELSLIM, replace(BASE, layer=shape(max_positions=131072)), midlayer, own_embedding=True
    ),
    "speculators": Case(
        REDHAT, replace(BASE, layer=shape(), norm_before_residual=True), own_embedding=True
    ),
    "speculators, qwen3 layers": Case(
        REDHAT
        | {
            "norm_before_residual": False,
            "norm_before_fc": True,
            "transformer_layer_config": REDHAT["transformer_layer_config"] | {"model_type": "qwen3"},  # type: ignore[operator]
        },
        replace(BASE, layer=shape(qk_norm=True), norm_before_fc=True),
    ),
    "speculators, three layers": Case(
        REDHAT | {"transformer_layer_config": REDHAT["transformer_layer_config"] | {"num_hidden_layers": 3}},  # type: ignore[operator]
        replace(BASE, layer=shape(windows=(None,) * 3), norm_before_residual=True),
    ),
}  # fmt: skip


def write(case: Case, head: Eagle3Head, folder: Path) -> None:
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()
    }
    if case.own_embedding:
        tensors["embed_tokens.weight"] = head.token_embedding.half()
    tensors["t2d"] = torch.zeros(60, dtype=torch.bool).index_fill_(0, head.target_ids, True)
    tensors = {case.rename(name): tensor.contiguous() for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(case.document))
    if case.pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def drafted(head: Eagle3Head) -> tuple[Tensor, Tensor]:
    """Logits of a pass over real states, and of one that is fed its own outputs."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(6, len(head.hidden_layers) * head.config.target_hidden_size, generator=generator)
    feedback = head(torch.tensor([1, 7, 59, 7, 0, 3]), head.combine(states), torch.arange(6), WholeSequence())
    again = head(torch.tensor([7, 59, 7, 0, 3, 9]), feedback, torch.arange(6) + 1, WholeSequence())
    return head.logits(feedback), head.logits(again)


@pytest.mark.parametrize("name", CASES)
def test_a_published_layout_loads_to_the_same_head(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    # Published weights are half floats: what is compared below is exact.
    expected = random_head(case.config).half().float()
    write(case, expected, tmp_path)
    head = load(tmp_path, TARGET_LAYERS, allow_pickle=case.pickled)
    assert head.hidden_layers == case.config.aux_layer_ids
    assert head.config.layer == case.config.layer
    assert torch.equal(head.target_ids, expected.target_ids)
    if not case.own_embedding:
        expected.token_embedding = head.token_embedding
    for ours, theirs in zip(drafted(head), drafted(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "count"),
    [("speculators", LayerCount.HIDDEN_STATES), ("modelopt", LayerCount.LAYER_OUTPUTS)],
)
def test_the_dialect_decides_how_layers_are_counted(name: str, count: LayerCount, tmp_path: Path) -> None:
    """[2, 16, 29] for one is [1, 15, 28] for the other."""
    case = CASES[name]
    write(case, random_head(case.config), tmp_path)
    head = load(tmp_path, TARGET_LAYERS)
    assert (head.config.counted_as, head.hidden_layers) == (count, (2, 16, 29))


def test_unnamed_layers_need_the_target(tmp_path: Path) -> None:
    write(CASES["specforge"], random_head(CASES["specforge"].config), tmp_path)
    with pytest.raises(ModelLoadError, match="names no target layers"):
        load(tmp_path)


def test_official_heads_leave_states_of_their_own_width_unprojected(tmp_path: Path) -> None:
    """As the official code does: three states of a target a third as wide need no `fc`."""
    hidden = {"hidden_size": 48, "target_hidden_size": 16, "num_attention_heads": 6, "num_key_value_heads": 3}
    layer = shape(hidden_size=48, num_heads=6, num_kv_heads=3, max_positions=2048)
    config = replace(BASE, layer=layer, target_hidden_size=16, projects=False)
    case = Case(OFFICIAL | hidden, config, midlayer, pickled=True, own_embedding=True)
    head = Eagle3Head(config, torch.randn(60, 48)).requires_grad_(False)
    head.d2t.copy_(2 * torch.arange(20))
    write(case, head, tmp_path)
    states = torch.randn(2, 48)
    assert torch.equal(load(tmp_path, TARGET_LAYERS, allow_pickle=True).combine(states), states)
