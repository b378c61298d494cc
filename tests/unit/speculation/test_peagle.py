"""P-EAGLE: an EAGLE3 head whose masks draft several tokens in one pass, without a trace in the KV of real pairs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler, SampleRow
from cluster.errors import ModelLoadError
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.peagle import PEagleDrafter, PEagleHead
from tests.fixtures.prompts import TINY_EAGLE3, TINY_PEAGLE, TINY_TARGET
from tests.support.plain_attention import WholeSequence
from tests.unit.speculation.drafting import GREEDY, Sequenced, pool_of, prompts, scattered_blocks, states, target

MASK = 5
HOT = SamplingParams(max_tokens=9, temperature=2.5)


def load(
    folder: Path = TINY_PEAGLE, drafts: int = 4, method: SpeculationMethod = SpeculationMethod.PEAGLE
) -> PEagleDrafter:
    config = EngineConfig(TINY_TARGET, folder, method, num_speculative_tokens=drafts)
    drafter = load_drafter(config, target(), Sampler(2048))
    assert isinstance(drafter, PEagleDrafter)
    pool_of(drafter)
    return drafter


def edited(
    tmp_path: Path, drop: Sequence[str] = (), tensors: dict[str, Tensor] | None = None, **changes: object
) -> Path:
    """The tiny head with fields and tensors dropped, changed or added."""
    folder = Path(shutil.copytree(TINY_PEAGLE, tmp_path / "draft"))
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    weights = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({k: v for k, v in weights.items() if k not in drop}, folder / "model.safetensors")
    return folder


def plain_drafts(drafter: PEagleDrafter, ids: Sequence[int], params: SamplingParams, mask: int = MASK) -> list[int]:
    """Four drafts from one pass written out: real pairs, then masks, over the whole sequence at once."""
    head = drafter.head
    assert isinstance(head, PEagleHead)
    aux = states(drafter, ids)
    assert aux is not None
    with torch.inference_mode():
        pairs = torch.cat([aux[:-1], head.mask_hidden.expand(3, -1)])
        tokens = torch.tensor([*ids[1:], mask, mask, mask])
        output = head(tokens, head.combine(pairs), torch.arange(len(tokens)), WholeSequence())
        logits = head.logits(output[-4:]).float()
    drawn: list[int] = []
    for j in range(4):
        token = Sampler(2048).sample(logits[j : j + 1], [SampleRow(params, 11, len(ids) + j)]).tokens[0]
        assert token is not None
        drawn.append(token)
    return drawn


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_drafts_are_those_of_one_pass_over_pairs_and_masks(params: SamplingParams) -> None:
    drafter = load()
    for i, ids in enumerate(prompts(5, 20, 60)):
        drafts = Sequenced(drafter, list(ids), scattered_blocks(i), params=params).propose(4)
        assert list(drafts) == plain_drafts(drafter, ids, params)


def test_how_many_are_drafted_changes_none_of_them() -> None:
    drafter = load()
    tokens = list(prompts(1, 20, 60)[0])
    most = Sequenced(drafter, tokens, scattered_blocks(0)).propose(4)
    for k in (1, 2, 3):
        assert Sequenced(drafter, tokens, scattered_blocks(1)).propose(k) == most[:k]


@pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id", "pard_token"])
def test_the_mask_token_goes_by_several_names(key: str, tmp_path: Path) -> None:
    """One trainer writes it as text, and the mask state with one dimension less."""
    state = load_file(TINY_PEAGLE / "model.safetensors")["mask_hidden"]
    folder = edited(tmp_path, drop=["mask_token_id"], tensors={"mask_hidden": state.view(1, -1)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: str(MASK) if key == "ptd_token_id" else MASK}))
    ids = list(prompts(1, 20, 60)[0])
    assert Sequenced(load(folder), ids, scattered_blocks(0)).propose(4) == Sequenced(
        load(), ids, scattered_blocks(0)
    ).propose(4)


def test_a_trained_embedding_is_used_for_tokens_and_masks(tmp_path: Path) -> None:
    table = torch.randn(2048, 192, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    folder = edited(tmp_path, tensors={"embed_tokens.weight": table})
    drafter = load(folder)
    changed = 0
    for i, ids in enumerate(prompts(4, 20, 60)):
        drafts = list(Sequenced(drafter, list(ids), scattered_blocks(i), params=HOT).propose(4))
        assert drafts == plain_drafts(drafter, ids, HOT)
        changed += drafts != plain_drafts(load(), ids, HOT)
    assert changed


def refusal(folder: Path, method: SpeculationMethod = SpeculationMethod.PEAGLE) -> str:
    with pytest.raises(ModelLoadError) as raised:
        load(folder, method=method)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_checkpoints_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path) -> None:
    assert "names no mask token" in refusal(edited(tmp_path / "a", drop=["mask_token_id"]))
    assert "is 2048, but must be below 2048" in refusal(edited(tmp_path / "b", mask_token_id=2048))
    assert "lacks tensor mask_hidden" in refusal(edited(tmp_path / "c", drop=["mask_hidden"]))
    assert "Tensor mask_hidden" in refusal(edited(tmp_path / "d", tensors={"mask_hidden": torch.ones(1, 1, 192)}))
    assert "names architectures" in refusal(edited(tmp_path / "e", architectures=["LlamaModel"]))


def test_ordinary_and_parallel_heads_are_not_mixed_up() -> None:
    assert "or method eagle3 for an ordinary one" in refusal(TINY_EAGLE3)
    assert "tensor mask_hidden" in refusal(TINY_PEAGLE, SpeculationMethod.EAGLE3)
