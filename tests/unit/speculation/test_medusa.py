"""Medusa: each head guesses one token ahead of the newest, from the state that this token was sampled from."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler, SampleRow
from cluster.errors import ModelLoadError
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.medusa import MedusaDrafter
from cluster.speculation.protocol import DraftTask
from tests.fixtures.prompts import TINY_MEDUSA, TINY_TARGET
from tests.unit.speculation.drafting import GREEDY, prompts, states, target

HOT = SamplingParams(max_tokens=9, temperature=2.5, presence_penalty=0.5)
SEED = 11


def load(
    folder: Path = TINY_MEDUSA, drafts: int = 2, allow_pickle: bool = False, tree: tuple[int, int] = (1, 60)
) -> MedusaDrafter:
    config = EngineConfig(
        TINY_TARGET,
        folder,
        SpeculationMethod.MEDUSA,
        num_speculative_tokens=drafts,
        allow_pickle=allow_pickle,
        tree_top_k=tree[0],
        tree_total_tokens=tree[1],
    )
    drafter = load_drafter(config, target(), Sampler(2048))
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def task(
    drafter: MedusaDrafter, tokens: Sequence[int], params: SamplingParams, k: int = 2, start: int = 0
) -> DraftTask:
    """As a step leaves it: the target has computed positions start.. up to the newest token but one."""
    aux = states(drafter, tokens)
    assert aux is not None
    num_prompt = len(tokens) - 3
    return DraftTask(
        "r", tuple(tokens), 0, 0, k, params, SEED, num_prompt, hidden_start=start, hidden=aux[start : len(tokens) - 1]
    )


def plain_drafts(tensors: dict[str, Tensor], tokens: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """The published formula, from the tensors of the file."""
    state = states(load(), tokens)[len(tokens) - 2]  # type: ignore[index]
    drawn: list[int] = []
    for head in range(2):
        weight, bias, output = (
            tensors[f"{head}.{name}"].float() for name in ("0.linear.weight", "0.linear.bias", "1.weight")
        )
        logits = linear(state + silu(linear(state, weight, bias)), output)
        row = SampleRow(params, SEED, len(tokens) + head, tokens[:-3], tokens[-3:], drawn)
        token = Sampler(2048).sample(logits[None], [row]).tokens[0]
        assert token is not None
        drawn.append(token)
    return tuple(drawn)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MEDUSA, tmp_path / "medusa"))


def rewrite(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    save_file(tensors, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **config}))
    return folder


def weights() -> dict[str, Tensor]:
    return load_file(TINY_MEDUSA / "model.safetensors")


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_drafts_are_those_of_the_published_formula(params: SamplingParams) -> None:
    drafter = load()
    for ids in prompts(5, 20, 60):
        assert drafter.propose([task(drafter, ids, params)]) == [Drafts.chain(plain_drafts(weights(), ids, params))]


def test_the_first_head_guesses_the_token_after_the_newest(checkpoint: Path) -> None:
    """A head that only repeats the target's own logits names the newest token, which was sampled from this state. So a
    head that looks one further names the next one."""
    tensors = weights()
    tensors["0.1.weight"] = target().model.lm_head.weight.detach().contiguous()
    for name in ("0.0.linear.weight", "0.0.linear.bias"):
        tensors[name].zero_()
    drafter = load(rewrite(checkpoint, tensors))
    for ids in prompts(4, 20, 60):
        aux = states(drafter, ids)
        assert aux is not None
        newest = int(linear(aux[-1], tensors["0.1.weight"]).argmax())
        assert drafter.propose([task(drafter, [*ids, newest], GREEDY, k=1)]) == [Drafts.chain([newest])]


def test_what_was_reused_or_batched_makes_no_difference() -> None:
    drafter = load()
    sequences = prompts(4, 20, 60)
    alone = [drafter.propose([task(drafter, ids, HOT)])[0] for ids in sequences]
    tasks = [task(drafter, ids, HOT, start=len(ids) - 2 - i) for i, ids in enumerate(sequences)]
    chunk = DraftTask("c", sequences[0], 0, 0, 0, HOT, SEED, 5)
    one = task(drafter, sequences[0], HOT, k=1)
    assert drafter.propose([tasks[0], chunk, *tasks[1:], one]) == [
        alone[0], NO_DRAFTS, *alone[1:], alone[0].first(1),
    ]  # fmt: skip


def test_a_tree_holds_the_likeliest_paths_through_the_heads() -> None:
    drafter = load(tree=(3, 7))
    for ids in prompts(4, 20, 60):
        drafts = drafter.propose([task(drafter, ids, GREEDY)])[0]
        first, second = (
            logits[0].log_softmax(-1).topk(3)
            for logits in drafter._heads.logits(states(drafter, ids)[-2:-1], 2)  # type: ignore[index]
        )
        paths = {(token,): score for token, score in zip(first.indices.tolist(), first.values.tolist(), strict=True)}
        for token, score in zip(second.indices.tolist(), second.values.tolist(), strict=True):
            paths |= {(*path, token): paths[path] + score for path in [path for path in paths if len(path) == 1]}
        best = sorted(paths, key=lambda path: -paths[path])[:7]
        assert {tuple(drafts.tokens[node] for node in drafts.path(end)) for end in range(len(drafts))} == set(best)


def test_trees_of_a_batch_are_those_of_each_alone() -> None:
    drafter, sequences = load(tree=(2, 5)), prompts(4, 20, 60)
    alone = [drafter.propose([task(drafter, ids, HOT)])[0] for ids in sequences]
    shallow = drafter.propose([task(drafter, sequences[0], HOT, k=1)])[0]
    assert shallow.depth == 1 < max(drafts.depth for drafts in alone)
    tasks = [task(drafter, sequences[0], HOT, k=1), *(task(drafter, ids, HOT) for ids in sequences)]
    assert drafter.propose(tasks) == [shallow, *alone]


def test_a_task_without_the_newest_state_breaks_the_contract() -> None:
    drafter = load()
    ids = prompts(1, 20, 60)[0]
    stale = DraftTask("r", (*ids, 7), 0, 0, 2, GREEDY, SEED, 5, hidden=states(drafter, ids)[:-1])  # type: ignore[index]
    with pytest.raises(ValueError, match="lacks the hidden state before its newest token"):
        drafter.propose([stale])


def test_logits_that_are_not_finite_end_a_chain(checkpoint: Path) -> None:
    tensors = weights()
    tensors["1.1.weight"][:] = torch.nan
    drafter = load(rewrite(checkpoint, tensors))
    ids = prompts(1, 20, 60)[0]
    assert drafter.propose([task(drafter, ids, GREEDY)]) == [load().propose([task(drafter, ids, GREEDY)])[0].first(1)]


def test_there_are_no_more_drafts_than_heads() -> None:
    assert load(drafts=5).shape.max_draft_tokens == 2
    assert load(drafts=1).shape.max_draft_tokens == 1


@pytest.mark.parametrize("prefix", ["medusa_heads.", "medusa_head."])
def test_names_may_have_a_prefix_and_the_file_may_hold_the_target_too(prefix: str, checkpoint: Path) -> None:
    tensors = {prefix + name: tensor for name, tensor in weights().items()}
    drafter = load(rewrite(checkpoint, {**tensors, "model.norm.weight": torch.ones(192)}))
    ids = prompts(1, 20, 60)[0]
    assert drafter.propose([task(drafter, ids, GREEDY)]) == load().propose([task(drafter, ids, GREEDY)])


def test_heads_beyond_the_configured_number_count(checkpoint: Path) -> None:
    """The official files hold five heads, where their configuration says two."""
    tensors = weights()
    more = {name.replace("1.", "2.", 1): tensor.clone() for name, tensor in tensors.items() if name.startswith("1.")}
    assert load(rewrite(checkpoint, {**tensors, **more}), drafts=5).shape.max_draft_tokens == 3


def test_a_pickled_checkpoint_needs_permission(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights(), checkpoint / "medusa_lm_head.pt")
    assert "allow_pickle is not set" in refusal(checkpoint)
    drafter = load(checkpoint, allow_pickle=True)
    ids = prompts(1, 20, 60)[0]
    assert drafter.propose([task(drafter, ids, HOT)]) == load().propose([task(drafter, ids, HOT)])


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as raised:
        load(folder)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_checkpoints_that_do_not_fit_are_refused_in_one_sentence(checkpoint: Path) -> None:
    tensors = weights()
    assert "medusa_num_layers" in refusal(rewrite(checkpoint, tensors, medusa_num_layers=2))
    assert "but must be between 1 and 64" in refusal(rewrite(checkpoint, tensors, medusa_num_layers="one"))
    assert "lack" in refusal(rewrite(checkpoint, tensors, medusa_num_layers=1, medusa_num_heads=3))
    fewer = {name: tensor for name, tensor in tensors.items() if name != "1.0.linear.bias"}
    assert "lacks tensor 1.0.linear.bias" in refusal(rewrite(checkpoint, fewer, medusa_num_heads=2))
    narrow = {name: tensor[..., :64].contiguous() for name, tensor in tensors.items()}
    narrow |= {name: tensor[:64].contiguous() for name, tensor in narrow.items() if "linear" in name}
    assert "reads hidden states of size 64, but the target has 192" in refusal(rewrite(checkpoint, narrow))
    short = {n: t[:100].contiguous() if n.endswith(".1.weight") else t for n, t in tensors.items()}
    assert "vocabulary is not the target's" in refusal(rewrite(checkpoint, short))
