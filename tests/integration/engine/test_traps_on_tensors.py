"""The traps of joint reuse on a real model: what the token oracle shows for cells, shown here for tensors.

Every case ends with the audit: all KV that is published must equal what one unchunked, uncached forward computes.
"""

import pytest

from cluster.engine.audit import PublishedSequence
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from tests.integration.engine.support import eight_prompts, greedy, make_engine

BLOCK = 4
TEXT = eight_prompts()[0]
OTHER = tuple(reversed(eight_prompts()[1]))


class Served:
    """An engine with an EAGLE3 draft, and what it has served."""

    def __init__(self, **options: object) -> None:
        self.engine: Engine = make_engine("eagle3", block_size=BLOCK, **options)  # type: ignore[arg-type]
        self.sequences: list[PublishedSequence] = []

    def ask(self, prompt: tuple[int, ...], tenant_salt: bytes = b"") -> RequestEvent:
        request = EngineRequest(f"r{len(self.sequences)}", prompt, greedy(6, ignore_eos=True), tenant_salt=tenant_salt)
        (event,) = self.engine.generate([request])
        self.sequences.append(PublishedSequence((*prompt, *event.token_ids), tenant_salt))
        return event

    def audit(self) -> None:
        for result in self.engine.audit(self.sequences):
            assert result.ok and result.compared, result


@pytest.mark.parametrize("fork", [7, 8, 9, 12, 13])
def test_trap_02_a_fork_around_a_blocks_end(fork: int) -> None:
    served = Served()
    served.ask((*TEXT[:fork], *OTHER[:20]))
    branch = (*TEXT[:fork], *OTHER[30:50])
    assert branch[fork] != OTHER[0]
    usage = served.ask(branch).usage
    assert usage is not None
    assert (usage.reused_target, usage.reused_draft, usage.reused_joint) == (fork, fork - 1, fork - 1)
    served.audit()


@pytest.mark.parametrize("lost", [1, 3, 100])
def test_trap_01_a_draft_that_lost_blocks_is_computed_again_beside_the_shared_target(lost: int) -> None:
    served = Served()
    first = served.ask(TEXT)
    before = [tensor.clone() for tensor in served.engine.parts.kv["target"].keys]
    held = served.engine.parts.cache.pools["target"].tree.runs()
    shared = [block for run in held for block in run.blocks[: len(TEXT) // BLOCK]]
    served.engine.parts.cache.pools["draft"].tree.evict(lost)
    again = served.ask(TEXT)
    assert again.token_ids == first.token_ids
    for old, new in zip(before, served.engine.parts.kv["target"].keys, strict=True):
        assert old[shared[: len(TEXT) // BLOCK]].equal(new[shared[: len(TEXT) // BLOCK]]), "a shared block was written"
    served.audit()


def test_trap_20_a_fork_and_a_rebase() -> None:
    served = Served()
    served.ask((*TEXT[:8], *OTHER[:12]))
    mine = (*TEXT[:8], *OTHER[30:42])
    first, again = served.ask(mine), served.ask(mine)
    assert first.token_ids == again.token_ids
    assert again.usage is not None and again.usage.reused_joint == len(mine) - 1
    served.audit()


def test_trap_23_two_readers_of_one_partial_block() -> None:
    served = Served()
    served.ask(TEXT[:10])
    kv, cache = served.engine.parts.kv["target"], served.engine.parts.cache
    published = sorted({block for run in cache.pools["target"].tree.runs() for block in run.blocks})
    before = [tensor[published].clone() for tensor in kv.keys]
    for last in (1, 2):
        served.ask((*TEXT[:9], *OTHER[last : last + 3]))
    for old, new in zip(before, kv.keys, strict=True):
        assert old.equal(new[published])
    served.audit()


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_trap_06_chunks_of_any_size(chunk: int) -> None:
    whole, cut = Served(chunk=None), Served(chunk=chunk)
    assert whole.ask(TEXT).token_ids == cut.ask(TEXT).token_ids
    cut.audit()


def test_trap_27_tenants_share_nothing() -> None:
    served = Served()
    served.ask(TEXT, b"one")
    usage = served.ask(TEXT, b"two").usage
    assert usage is not None
    assert (usage.reused_target, usage.reused_draft) == (0, 0)
    served.audit()
