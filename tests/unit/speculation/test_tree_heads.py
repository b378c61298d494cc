"""Trees that heads draft in paged scratch slots are those of the head alone, run anew over the whole of each path."""

import pytest
import torch

from cluster.speculation.lookahead import drafts_trees, has_draft_kv
from cluster.speculation.recurrent import RecurrentDrafter
from cluster.speculation.tree import TreeShape
from tests.support.plain_attention import WholeSequence
from tests.unit.core.test_drafts import spelled
from tests.unit.speculation.drafting import (
    FOLDERS,
    Sequenced,
    assert_slots_equal,
    expected_kv,
    new_drafter,
    pool_of,
    prompts,
    scattered_blocks,
    states,
)

TREE_METHODS = [method for method in FOLDERS if drafts_trees(method) and has_draft_kv(method)]
TREE = TreeShape(3, 14)
DEPTH = 4


class Dense:
    """The head of a drafter over `tokens`, without pages."""

    def __init__(self, drafter: RecurrentDrafter, tokens: tuple[int, ...]) -> None:
        self.head, self.tokens = drafter.head, tokens
        hidden = states(drafter, tokens)
        assert hidden is not None
        self.states = drafter.combine(hidden[: len(tokens) - 1])

    @torch.inference_mode()
    def contenders(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """The likeliest tokens after `path`, with the logarithms of their probabilities."""
        ids, hidden = torch.tensor(self.tokens[1:]), self.states
        for token in (*path, None):
            feedback = self.head.forward(ids, hidden, torch.arange(len(ids)), WholeSequence())[-1:]
            if token is not None:
                ids, hidden = torch.cat([ids, torch.tensor([token])]), torch.cat([hidden, feedback])
        best = torch.log_softmax(self.head.logits(feedback)[0].float(), -1).topk(TREE.top_k)
        wanted = best.indices if self.head.target_ids is None else self.head.target_ids[best.indices]
        return list(zip(wanted.tolist(), best.values.tolist(), strict=True))

    def tree(self) -> set[tuple[int, ...]]:
        level: dict[tuple[int, ...], float] = {(): 0.0}
        nodes: dict[tuple[int, ...], float] = {}
        for _ in range(DEPTH):
            level = {
                (*path, token): score + more for path, score in level.items() for token, more in self.contenders(path)
            }
            nodes |= level
            level = dict(sorted(level.items(), key=lambda entry: -entry[1])[: TREE.top_k])
        return set(sorted(nodes, key=lambda path: -nodes[path])[: TREE.total])


@pytest.mark.parametrize("method", TREE_METHODS)
def test_a_tree_is_what_the_head_makes_of_each_path(method: str) -> None:
    drafter = new_drafter(method, DEPTH, TREE)
    assert isinstance(drafter, RecurrentDrafter)
    texts = prompts(3, 20, 40)
    requests = [Sequenced(drafter, list(text), scattered_blocks(i)) for i, text in enumerate(texts)]
    together = drafter.propose([request.task(k=DEPTH) for request in requests])
    for drafts, text in zip(together, texts, strict=True):
        assert set(spelled(drafts)) == Dense(drafter, text).tree()


@pytest.mark.parametrize("method", TREE_METHODS)
def test_scratch_is_rewritten_from_real_inputs(method: str) -> None:
    """Whatever trees left behind, the KV of known tokens is that of one pass."""
    drafter = new_drafter(method, DEPTH, TREE)
    kv = pool_of(drafter)
    tokens = list(prompts(1, 30, 60)[0])
    request = Sequenced(drafter, tokens[:20], scattered_blocks(1))
    while len(request.tokens) < len(tokens):
        drafts = drafter.propose([request.task(k=DEPTH)])[0]
        assert len(drafts) == TREE.total
        request.tokens += tokens[len(request.tokens) :][: 1 + len(request.tokens) % 4]
    drafter.propose([request.task()])
    assert_slots_equal(kv, request.blocks, request.end, expected_kv(drafter, request.tokens))
