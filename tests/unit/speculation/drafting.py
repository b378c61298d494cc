"""What the drafter tests share: the tiny models, and one drafted sequence with blocks of its own.

Invariant: block tables are scattered and pools start out full of noise, so a drafter that reads a slot it never wrote
is found out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.sampler import Sampler
from cluster.engine.tokenizer import Tokenizer
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod, has_draft_kv
from cluster.speculation.protocol import Drafter, DraftTask, LayerKeysValues
from cluster.speculation.recompute import recompute_model
from cluster.speculation.tree import TreeShape
from tests.fixtures.prompts import TINY_DRAFTS, TINY_TARGET, mixed_prompts

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
FOLDERS = {SpeculationMethod(method): folder for method, folder in TINY_DRAFTS.items()}
KV_METHODS = tuple(method for method in FOLDERS if has_draft_kv(method))
BLOCK_SIZE = 8
NUM_BLOCKS = 64


@cache
def target() -> LoadedModel:
    return load_target(TINY_TARGET)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_TARGET)


@cache
def prompts(count: int, least: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Held-out prompts of between `least` and `most` tokens."""
    encoded = (tuple(tokenizer().encode(prompt.text)) for prompt in mixed_prompts(count * 20, seed=5))
    return tuple([ids for ids in encoded if least <= len(ids) <= most][:count])


def new_drafter(method: SpeculationMethod, drafts: int = 3, tree: TreeShape | None = None) -> Drafter:
    """A drafter of the tiny family with a pool of noise."""
    config = EngineConfig(model=TINY_TARGET, draft=FOLDERS[method], method=method, num_speculative_tokens=drafts)
    if tree is not None:
        config = replace(config, tree_top_k=tree.top_k, tree_total_tokens=tree.total)
    drafter = load_drafter(config, target(), Sampler(target().vocab_size))
    assert drafter is not None
    drafter.attach(noisy_pool(drafter))
    return drafter


def noisy_pool(drafter: Drafter) -> KvTensors:
    assert drafter.kv_layout is not None
    kv = KvTensors(drafter.kv_layout, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))
    noise = torch.Generator().manual_seed(1)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(generator=noise)
    return kv


def pool_of(drafter: Drafter) -> KvTensors:
    """The pool that `drafter` writes, by attaching a fresh one."""
    kv = noisy_pool(drafter)
    drafter.attach(kv)
    return kv


def states(drafter: Drafter, tokens: Sequence[int]) -> torch.Tensor | None:
    """The target's hidden states that `drafter` reads, for every token."""
    return recompute_model(target(), tokens, drafter.hidden_layers)[1] if drafter.hidden_layers else None


def scattered_blocks(seed: int, count: int = 12) -> tuple[int, ...]:
    """Blocks out of order; tables of different seeds below 5 share none."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(order[seed * count : (seed + 1) * count])


@dataclass
class Sequenced:
    """One request's drafting: known tokens and the draft cursor; `write` makes the next task."""

    drafter: Drafter
    tokens: list[int]
    blocks: tuple[int, ...]
    prompt: int = 0
    cursor: int = 0
    held: int = 0
    params: SamplingParams = GREEDY
    seed: int = 11
    request_id: str = field(default="r")

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def end(self) -> int:
        return self.drafter.shape.real_slots(len(self.tokens))

    def task(self, end: int | None = None, k: int = 0) -> DraftTask:
        """The slots from the cursor to `end` (default: all that are known), and the cursor moves there."""
        end = self.end if end is None else end
        hidden = states(self.drafter, self.tokens)
        computed = None if hidden is None else hidden[self.cursor : max(end, len(self.tokens) - 1)]
        task = DraftTask(
            self.request_id, tuple(self.tokens), self.cursor, end, k, self.params, self.seed, self.prompt,
            self.blocks, self.held, self.cursor, computed,
        )  # fmt: skip
        self.cursor = end
        return task

    def propose(self, k: int = 3) -> tuple[int, ...]:
        return self.drafter.propose([self.task(k=k)])[0].tokens


def expected_kv(drafter: Drafter, tokens: Sequence[int]) -> list[LayerKeysValues]:
    return drafter.recompute(tokens, states(drafter, tokens))


def assert_slots_equal(kv: KvTensors, blocks: Sequence[int], slots: int, expected: list[LayerKeysValues]) -> None:
    """The first `slots` slots of a block table hold `expected`, up to rounding."""
    for layer, (keys, values) in enumerate(expected):
        held = kv.read(layer, blocks, slots)
        torch.testing.assert_close(held[0], keys[:slots], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(held[1], values[:slots], atol=2e-5, rtol=1e-4)
