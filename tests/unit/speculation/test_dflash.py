"""DFlash: a block of masks over the target's states, checked against transformers' own and a plain computation."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from cluster.engine.attention import AttentionSpec
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.dflash import DFlashDrafter
from cluster.speculation.dflash_config import DFlashConfig
from cluster.speculation.dflash_model import DFlashHead
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from tests.fixtures.prompts import TINY_DFLASH, TINY_TARGET
from tests.unit.speculation.drafting import (
    Sequenced,
    assert_slots_equal,
    expected_kv,
    pool_of,
    prompts,
    scattered_blocks,
    states,
    target,
)

MASK, BLOCK = 5, 4


def load(folder: Path = TINY_DFLASH, drafts: int = 3) -> DFlashDrafter:
    config = EngineConfig(TINY_TARGET, folder, SpeculationMethod.DFLASH, num_speculative_tokens=drafts)
    drafter = load_drafter(config, target(), Sampler(2048))
    assert isinstance(drafter, DFlashDrafter)
    pool_of(drafter)
    return drafter


def edited(tmp_path: Path, **changes: object) -> Path:
    folder = Path(shutil.copytree(TINY_DFLASH, tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def with_tensors(folder: Path, **changes: Tensor | None) -> Path:
    """The folder with tensors added or, where None, taken out."""
    tensors = {**load_file(folder / "model.safetensors"), **{name.replace("__", "."): t for name, t in changes.items()}}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return folder


def speculators(tmp_path: Path, **changes: object) -> Path:
    """The tiny draft as the speculators library writes it."""
    z_lab = json.loads((TINY_DFLASH / "config.json").read_text())
    folder = Path(shutil.copytree(TINY_DFLASH, tmp_path / "speculators"))
    document = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": z_lab,
        "draft_vocab_size": 2048, "block_size": BLOCK, "mask_token_id": MASK, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [1, 2, 3], "sample_from_anchor": False, "sliding_window_non_causal": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**document, **changes}))
    return folder


def theirs() -> MuseGlimmerAssistantModel:
    """The tiny draft as transformers' one DFlash architecture, which computes the same under other names."""
    ours = json.loads((TINY_DFLASH / "config.json").read_text())
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = MuseGlimmerAssistantConfig(
        **{name: ours[name] for name in (*same, "head_dim", "rms_norm_eps", "rope_parameters")},
        layer_types=["full_attention"] * 2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 1, 2],
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = load_file(TINY_DFLASH / "model.safetensors")
    model.load_state_dict({renamed.get(name, name): tensor.float() for name, tensor in tensors.items()})
    return model


def test_drafts_and_tokens_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that transformers' assisted decoding drafts, from the same known tokens."""
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = original(self, input_ids, *args, **kwargs)
        known = input_ids.shape[1]
        asked.append((tuple(input_ids[0].tolist()), tuple(candidates[0, known:].tolist())))
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    model = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32, local_files_only=True)
    assistant, drafter = theirs(), load()
    for ids in prompts(3, 20, 60):
        asked.clear()
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        plain = model.generate(torch.tensor([ids]), **options)
        assisted = model.generate(torch.tensor([ids]), assistant_model=assistant, speculation_type="dflash", **options)
        assert torch.equal(plain, assisted)
        blocks = [(known, drafts) for known, drafts in asked if len(drafts) == BLOCK - 1]
        assert len(blocks) >= 2
        for known, drafts in blocks:
            assert Sequenced(drafter, list(known), scattered_blocks(0)).propose(3) == drafts


@dataclass
class Dense:
    """An `AttentionPlan` of one block over a context that is computed afresh."""

    context: Sequence[tuple[Tensor, Tensor]]
    causal: bool = False

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        before, count = self.context[layer][0].shape[0], query.shape[1]
        keys, values = (
            torch.cat([kept.transpose(0, 1), own], dim=1)[None]
            for kept, own in zip(self.context[layer], (key, value), strict=True)
        )
        at, seen = torch.arange(before, before + count)[:, None], torch.arange(before + count)
        visible = (seen <= at) | (not self.causal)
        if spec.window is not None:
            visible = visible & (seen > at - spec.window)
        return scaled_dot_product_attention(query[None], keys, values, visible, scale=spec.scale, enable_gqa=True)[
            0
        ].transpose(0, 1)


def plain_drafts(folder: Path, ids: Sequence[int], causal_windows: bool = False, queries: int = BLOCK) -> Tensor:
    """Logits of a block's rows, without paging or packing."""
    head = DFlashHead.load(folder, BorrowedWeights.of(target().model), torch.float32, 4)
    with torch.inference_mode():
        aux = states(load(folder), ids)
        assert aux is not None
        context = list(head.context(head.combine(aux[:-1]), torch.arange(len(ids) - 1)))
        tokens = torch.tensor([ids[-1], *[MASK] * (queries - 1)])
        at = torch.arange(len(ids) - 1, len(ids) - 1 + queries)
        return head.logits(head(tokens, at, Dense(context), Dense(context, causal=causal_windows)))


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "use_sliding_window": True}


@pytest.mark.parametrize("causal", [False, True])
def test_layers_may_have_windows_which_see_the_block_causally_if_the_checkpoint_says_so(
    causal: bool, tmp_path: Path
) -> None:
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2], "causal": causal}
    folder = edited(tmp_path, **SLIDING, dflash_config=own)
    drafter = load(folder)
    seen = []
    for i, ids in enumerate(prompts(5, 20, 60)):
        expected = plain_drafts(folder, ids, causal)[1:].argmax(-1).tolist()
        assert Sequenced(drafter, list(ids), scattered_blocks(i % 4)).propose(3) == tuple(expected)
        seen.append(expected != plain_drafts(folder, ids, not causal)[1:].argmax(-1).tolist())
    assert any(seen)  # else nothing was shown


def test_how_many_are_drafted_changes_none_of_them() -> None:
    drafter = load()
    tokens = list(prompts(1, 20, 60)[0])
    most = Sequenced(drafter, tokens, scattered_blocks(0)).propose(3)
    for k in (1, 2):
        assert Sequenced(drafter, tokens, scattered_blocks(1)).propose(k) == most[:k]


def test_no_more_is_drafted_than_a_block_holds() -> None:
    drafter = load(drafts=8)
    assert (drafter.shape.max_draft_tokens, drafter.shape.scratch) == (BLOCK - 1, BLOCK)
    assert load(drafts=2).shape.scratch == 3


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_speculators_layout_means_the_same(chunk: int, tmp_path: Path) -> None:
    """Its layers are counted one higher."""
    z_lab, drafter = load(), load(speculators(tmp_path))
    kv, tokens = pool_of(drafter), list(prompts(1, 20, 60)[0])
    sequence = Sequenced(drafter, tokens, scattered_blocks(0))
    while sequence.cursor + chunk < sequence.end:
        drafter.propose([sequence.task(end=sequence.cursor + chunk)])
    assert sequence.propose() == Sequenced(z_lab, tokens, scattered_blocks(1)).propose()
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(z_lab, tokens))


def test_the_anchor_drafts_too_where_the_checkpoint_was_trained_so(tmp_path: Path) -> None:
    folder = speculators(tmp_path, sample_from_anchor=True)
    drafter = load(folder, drafts=8)
    assert (drafter.shape.max_draft_tokens, drafter.shape.scratch) == (BLOCK, BLOCK)
    ids = prompts(1, 20, 60)[0]
    expected = plain_drafts(folder, ids).argmax(-1).tolist()
    assert Sequenced(drafter, list(ids), scattered_blocks(0)).propose(4) == tuple(expected)


def test_a_vocabulary_of_its_own_is_mapped_to_the_targets(tmp_path: Path) -> None:
    ids = torch.arange(0, 2048, 2)
    rows = target().model.get_output_embeddings().weight[ids].to(torch.bfloat16).contiguous()
    folder = with_tensors(
        speculators(tmp_path, draft_vocab_size=1024), lm_head__weight=rows, d2t=ids - torch.arange(1024)
    )
    drafter = load(folder)
    for i, prompt in enumerate(prompts(4, 20, 60)):
        expected = plain_drafts(TINY_DFLASH, prompt)[1:, ids].argmax(-1)
        assert Sequenced(drafter, list(prompt), scattered_blocks(i)).propose(3) == tuple(ids[expected].tolist())


OWN = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}
BROKEN = {
    "another architecture": ({"architectures": ["Qwen3ForCausalLM"]}, "names architectures"),
    "its code": ({"architectures": ["Other"], "auto_map": {"AutoModel": "d.M"}}, "auto_map"),
    "mask": ({"dflash_config": {**OWN, "mask_token_id": 2048}}, "mask_token_id is 2048, but must be 0 to 2047"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "lacks or misstates field 'mask_token_id'"),
    "block": ({"block_size": 1}, "block_size is 1, but must be 2 to 2048"),
    "layers": ({"dflash_config": {**OWN, "target_layer_ids": [0, 1, 7]}}, "reads layer 8, but the target has 4"),
    "fewer layers": ({"dflash_config": {**OWN, "target_layer_ids": [0, 1]}}, "Tensor fc.weight .* has shape"),
    "width": ({"hidden_size": 96}, "hidden_size 96, but reads the target's embedding of width 192"),
    "draft layers": ({"num_hidden_layers": 3, "layer_types": None}, "lacks tensor layers.2"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(broken: str, tmp_path: Path) -> None:
    changes, message = BROKEN[broken]
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(edited(tmp_path, **changes))
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    for changes, message in (
        ({"hidden_norm__weight": None}, "lacks tensor hidden_norm.weight"),
        ({"markov_w1__weight": torch.ones(2)}, "has tensor markov_w1.weight"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            load(with_tensors(Path(shutil.copytree(folder, tmp_path / message)), **changes))


def test_a_map_out_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = torch.ones(1024, 192, dtype=torch.bfloat16)
    folder = with_tensors(
        speculators(tmp_path, draft_vocab_size=1024), lm_head__weight=rows, d2t=torch.full((1024,), 2000)
    )
    with pytest.raises(ModelLoadError, match="maps to token 3023, but the vocabulary has 2048"):
        load(folder)


def test_code_that_a_checkpoint_names_is_not_needed(tmp_path: Path) -> None:
    """The published ones name their own; a file of that name is never looked at."""
    folder = edited(tmp_path, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (folder / "dflash.py").write_text("raise RuntimeError('this was run')")
    tokens = list(prompts(1, 20, 60)[0])
    blocks = scattered_blocks(0)
    assert Sequenced(load(folder), tokens, blocks).propose() == Sequenced(load(), tokens, blocks).propose()


def test_default_layers_are_those_of_the_reference(tmp_path: Path) -> None:
    """Spread from the output of the second layer to that of the last but two."""
    folder = edited(tmp_path, dflash_config={"mask_token_id": MASK})
    assert DFlashConfig.from_folder(folder, 36).target_layers == (2, 34)
