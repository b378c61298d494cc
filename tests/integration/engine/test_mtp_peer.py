"""transformers' own `generate(use_mtp=True)` on the same checkpoints: the same drafts and the same answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cluster.core.drafts import Drafts
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.mtp import MtpDrafter
from cluster.speculation.protocol import DraftTask
from tests.unit.speculation.mtp_checkpoints import MTP, TARGET, VOCAB, WIDTH, build

MAX_TOKENS = 40
PROMPTS = torch.randint(VOCAB, (3, 19), generator=torch.Generator().manual_seed(4))
Asked = dict[tuple[int, ...], tuple[int, ...]]
"""Drafts by the tokens known when they were made."""


@pytest.fixture(params=["deepseek_v3", "glm4_moe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose MTP layers are often right: what follows is little more than a function of the last token."""
    build(request.param, tmp_path, own_head=False)  # transformers takes the target's in any case
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.2
        elif name.endswith("eh_proj.weight"):
            tensor[:, :WIDTH] = torch.eye(WIDTH)
            tensor[:, WIDTH:] *= 0.2
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path


def load_peer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """The target by transformers, which must be told of MTP layers behind as few layers as here."""
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(folder))]
    layers = [rf"model\.layers\.{TARGET + k}\..*" for k in range(MTP)]
    monkeypatch.setattr(architecture, "_keys_to_ignore_on_load_unexpected", layers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.config.num_mtp_layers = MTP
    return model


def theirs(
    model: PreTrainedModel, prompt: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[int, ...], Asked]:
    asked: Asked = {}
    original = MTPCandidateGenerator.get_candidates

    def listening(self: MTPCandidateGenerator, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        candidates, logits = original(self, input_ids, *args, **options)
        if logits is not None:
            known = tuple(input_ids[0].tolist())
            asked[known] = tuple(candidates[0, len(known) :].tolist())
        return candidates, logits

    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
    with monkeypatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", listening)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), use_mtp=True, **options)
    return tuple(output[0, len(prompt) :].tolist()), asked


def ours(
    folder: Path, prompt: Sequence[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[int, ...], Asked]:
    asked: Asked = {}
    original = MtpDrafter.propose

    def listening(self: MtpDrafter, tasks: Sequence[DraftTask]) -> list[Drafts]:
        drafts = original(self, tasks)
        asked.update({tuple(task.tokens): made.tokens for task, made in zip(tasks, drafts, strict=True) if task.k})
        return drafts

    config = EngineConfig(
        folder, None, SpeculationMethod.MTP, MTP, kv_bytes=1 << 20, chunk=chunk, block_size=4, audit=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(MtpDrafter, "propose", listening)
        engine = Engine(config)
        request = EngineRequest("r", tuple(prompt), SamplingParams(MAX_TOKENS, temperature=0, ignore_eos=True))
        (event,) = engine.generate([request])
    return event.token_ids, asked


@pytest.mark.parametrize("chunk", [5, 64])
def test_drafts_and_answers_are_those_of_transformers(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of which the last drafts were accepted all, in part or not at all."""
    model, compared, accepted = load_peer(folder, monkeypatch), 0, set()
    for prompt in PROMPTS.tolist():
        answer, their_drafts = theirs(model, prompt, monkeypatch)
        tokens, our_drafts = ours(folder, prompt, chunk, monkeypatch)
        assert tokens == answer
        whole = (*prompt, *answer)
        for known, drafts in our_drafts.items():
            assert drafts == their_drafts[known][: len(drafts)]
            compared += len(drafts)
            right = [i for i, token in enumerate(drafts) if whole[len(known) :][: i + 1] == drafts[: i + 1]]
            accepted.add(len(right))
    assert compared > 60
    assert accepted == {0, 1, 2}, "every way for a step to end occurs"
