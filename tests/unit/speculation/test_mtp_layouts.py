"""MTP layers of every public layout load, and compute what transformers' own layers compute."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.attention import GatherSdpa
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.mtp_model import MtpStack, load_mtp
from tests.unit.speculation.mtp_checkpoints import FAMILIES, MTP, TARGET, VOCAB, WIDTH, Checkpoint, build


def load(made: Checkpoint) -> MtpStack:
    return load_mtp(made.folder, BorrowedWeights.of(made.model), torch.float32, TARGET)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_gives_the_logits_of_its_layers_written_out(name: str, tmp_path: Path) -> None:
    made = build(name, tmp_path)
    stack = load(made)
    assert len(stack) == MTP
    tokens = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(2))
    state, slots = hidden[: 12 - MTP], 12 - MTP
    kv = KvTensors(stack.layout(), 3, 4, torch.device("cpu"))
    expected = made.reference(tokens, hidden)
    with torch.inference_mode():
        for k, logits in enumerate(expected):
            batch = pack([PagedRow(tokens[1 + k : 1 + k + slots].tolist(), 0, (2, 0, 1))], kv)
            state = stack.layer(k)(batch.input_ids[0], state, batch.positions[0], GatherSdpa().plan(batch, kv))
            assert logits.std() > 0.1, "logits that say nothing agree with anything"
            torch.testing.assert_close(stack.layer(k).logits(state), logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_its_place_in_the_pool(name: str, tmp_path: Path) -> None:
    layout = load(build(name, tmp_path)).layout()
    assert len(layout.layers) == MTP and layout.dtype is torch.float32


def test_copies_of_the_targets_matrices_take_no_memory(tmp_path: Path) -> None:
    """Those that differ stay."""
    made = build("glm4_moe", tmp_path)  # whose layers have a head of their own
    layer, target = load(made).layer(1), BorrowedWeights.of(made.model)
    assert layer.embedding.data_ptr() == target.embedding.data_ptr()
    assert torch.equal(layer.head, made.parts[1]["head"]) and not torch.equal(layer.head, target.output)


@pytest.fixture
def deepseek(tmp_path: Path) -> Checkpoint:
    return build("deepseek_v3", tmp_path)


def edited(made: Checkpoint, **changes: torch.Tensor | None) -> Checkpoint:
    """The same folder with some tensors of the first MTP layer replaced, or left out if None."""
    path = made.folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        full = f"model.layers.{TARGET}.{name}"
        tensors.pop(full)
        if tensor is not None:
            tensors[full] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    return made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hnorm.weight": None}, "MTP layer 0 .* lacks tensor hnorm.weight"),
        ({"self_attn.o_proj.weight": None}, "lack tensor 0.self_attn.o_proj.weight"),
        ({"mlp.experts.2.up_proj.weight": None}, "can't be built"),
        ({"enorm.weight": torch.ones(3)}, r"enorm.weight of MTP layer 0 .* has shape \(3,\), but config.json asks"),
        ({"self_attn.o_proj.weight": torch.ones(3, 3)}, "misshape tensor 0.self_attn.o_proj.weight"),
        ({"embed_tokens.weight": torch.ones(VOCAB, 3)}, r"embedding.weight of MTP layer 0 .* has shape \(64, 3\)"),
        ({"eh_proj.weight": None}, "lacks tensor eh_proj.weight"),
    ],
)
def test_damaged_layers_are_refused_in_one_sentence(
    deepseek: Checkpoint, changes: dict[str, torch.Tensor | None], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said) as raised:
        load(edited(deepseek, **changes))
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_a_checkpoint_without_mtp_layers_says_so(tmp_path: Path) -> None:
    made = build("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    ours = tuple(f"model.layers.{TARGET + k}." for k in range(MTP))
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(ours)}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="holds no MTP layers of a known layout"):
        load(made)


def test_quantised_layers_are_refused(deepseek: Checkpoint) -> None:
    path = deepseek.folder / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.{TARGET}.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="unquantised"):
        load(deepseek)


def test_an_unknown_architecture_is_refused_and_its_code_never_run(deepseek: Checkpoint) -> None:
    config = deepseek.folder / "config.json"
    changes = {"model_type": "never_heard_of", "auto_map": {"AutoConfig": "evil.Config"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    (deepseek.folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadError, match="names model_type never_heard_of"):
        load(deepseek)


def test_an_architecture_that_transformers_has_no_causal_model_of_is_named(tmp_path: Path) -> None:
    made = build("step3p5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("pad_token_id", "layer_types"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "step3p5"}))
    with pytest.raises(ModelLoadError, match=r"names model_type step3p5.*: use another speculation method\."):
        load(made)
