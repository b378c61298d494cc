"""The traps of joint reuse, by number: what may be shared, and what must not."""

import random

import pytest

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.handle import Coupling
from cluster.core.keys import KeyStream, raw_block_keys
from cluster.core.paired_cache import PairedCache, PoolSpec
from cluster.speculation.lookahead import (
    SpeculationMethod,
    coupling_of,
    draft_kv_lookahead,
    has_draft_kv,
    joint_reuse_eligible,
)
from tests.unit.core.oracle import OracleTensors, make_pair, serve, start
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference

BLOCK = 4
SPANS = range(5)


def draft_cells(oracle: OracleTensors) -> set[tuple[int, ...]]:
    """What the published cells of the draft pool were computed from."""
    return {cell for _, _, cell in oracle.published("draft")}


def test_trap_01_the_joint_depth_is_the_smaller_one() -> None:
    oracle = make_pair()
    serve(oracle, range(33))
    draft = oracle.cache.pools["draft"].tree
    draft.evict(draft.cached - 3)
    again = start(oracle, range(33))
    assert oracle.cache.probe(again.handle).target == 32
    assert again.handle.cursor("target") == again.handle.cursor("draft") == 3 * BLOCK
    # The target's blocks beyond are shared all the same; what is computed again must not be written to them.
    assert again.handle.held("target") == 32
    assert again.handle.held("draft") == 3 * BLOCK


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("fork", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13])
def test_trap_02_no_draft_cell_that_depends_on_the_fork_is_reused(span: int, fork: int) -> None:
    oracle = make_pair(span)
    common = list(range(fork))
    serve(oracle, [*common, *[50] * 12])
    other = start(oracle, [*common, *[60] * 12])  # `start` compares every claimed cell with the oracle
    assert oracle.cache.probe(other.handle).draft == max(0, fork - span)
    assert other.handle.cursor("draft") == max(0, fork - span)
    assert oracle.cache.probe(other.handle).target == fork


@pytest.mark.parametrize("span", SPANS)
def test_trap_02_a_difference_in_the_leading_window_alone_keeps_all_draft_cells_apart(span: int) -> None:
    oracle = make_pair(span)
    serve(oracle, [1, *range(100, 120)])
    other = start(oracle, [2, *range(100, 120)])
    assert other.handle.cursor("draft") == 0
    assert oracle.cache.probe(other.handle).draft == 0


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_trap_03_prompts_no_longer_than_the_span_have_an_empty_stream(span: int, length: int) -> None:
    oracle = make_pair(span)
    for _ in range(2):
        request = start(oracle, range(length))
        assert request.handle.holdings["draft"].stream.n_units == max(0, length - span)
        request.finish_prefill()
        assert request.handle.cursor("draft") == max(0, length - span)
        request.end()
        oracle.cache.check()


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("length", [9, 11, 12, 13])
def test_trap_04_the_same_prompt_again_reuses_all_but_the_last_positions(span: int, length: int) -> None:
    oracle = make_pair(span)
    serve(oracle, range(length), answer=[7])
    again = start(oracle, range(length))
    assert again.handle.cursor("target") == again.handle.cursor("draft") == length - max(1, span)


@pytest.mark.parametrize("span", SPANS)
def test_trap_05_the_last_positions_are_not_claimable_by_another_continuation(span: int) -> None:
    oracle = make_pair(span)
    serve(oracle, [*range(8), 50], answer=[51, 52, 53, 54, 55])
    other = start(oracle, [*range(8), 60, 61, 62, 63, 64, 65])
    assert other.handle.cursor("draft") == 8 - span


@pytest.mark.parametrize("span", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 14, None])
def test_trap_06_draft_kv_does_not_depend_on_chunks(span: int, chunk: int | None) -> None:
    oracle = _run_in_chunks(range(100, 114), span, chunk)
    whole = _run_in_chunks(range(100, 114), span, None)
    assert draft_cells(oracle) == draft_cells(whole)
    assert len(draft_cells(oracle)) == 14 + 6 - max(1, span)


def test_trap_06_a_chunk_of_a_prompt_feeds_the_draft_the_real_next_tokens() -> None:
    oracle = make_pair(span=1, block_size=1)
    request = start(oracle, [11, 12, 13])
    assert request.prefill(2)
    assert [oracle.read(request.handle, "draft", slot) for slot in range(2)] == [(11, 12), (11, 12, 13)]
    request.finish_prefill()
    request.say([99])
    assert oracle.read(request.handle, "draft", 2) == (11, 12, 13, 99)


def _run_in_chunks(prompt: range, span: int, chunk: int | None) -> OracleTensors:
    oracle = make_pair(span)
    limits = AdmissionLimits(max_batch=4, token_budget=64, chunk=chunk, max_queue=8, max_len=100)
    worker = OracleWorker(oracle, limits, DraftShape(Coupling.JOINT, span, 2), random.Random(1))
    worker.admission.submit(make_request("a", prompt, 6))
    worker.drain(60)
    worker.oracle.check_published()
    return worker.oracle


@pytest.mark.parametrize("span", [0, 1, 3])
def test_trap_07_a_packed_row_never_sees_the_next_rows_tokens(span: int) -> None:
    oracle = make_pair(span)
    limits = AdmissionLimits(max_batch=4, token_budget=64, chunk=5, max_queue=8, max_len=100)
    worker = OracleWorker(oracle, limits, DraftShape(Coupling.JOINT, span, 3), random.Random(2))
    prompts = [tuple(range(base, base + 7)) for base in (100, 200, 300)]
    for prompt in prompts:
        worker.admission.submit(make_request(str(prompt[0]), prompt, 5))
    worker.drain(40)
    texts = [(*prompt, *reference(prompt, 5)) for prompt in prompts]
    for pool in ("target", "draft"):
        for _, _, cell in worker.oracle.published(pool):
            assert any(text[: len(cell)] == cell for text in texts)


@pytest.mark.parametrize("method", SpeculationMethod)
def test_trap_08_a_mode_is_eligible_if_its_span_is_known_and_it_has_a_pool(method: SpeculationMethod) -> None:
    two_pools = coupling_of(method) is not Coupling.NONE
    assert two_pools == has_draft_kv(method)
    assert joint_reuse_eligible(method) == (two_pools and draft_kv_lookahead(method) is not None)


def test_trap_09_without_speculation_keys_and_allocation_are_the_plain_ones() -> None:
    paired, plain = make_pair(), OracleTensors(PairedCache(PoolSpec("target", BLOCK, 64)))
    untouched = paired.cache.meters()["draft"]
    for prompt in (range(10), range(13), [*range(6), 50, 51, 52]):
        tables = []
        for oracle in (paired, plain):
            request = start(oracle, prompt, use_draft=False)
            request.finish_prefill()
            request.say([7, 8])
            assert request.handle.pools == ("target",)
            tables.append(list(request.handle.block_table("target")))
            request.end()
        assert tables[0] == tables[1]
    assert paired.cache.meters()["draft"] == untouched
    assert paired.cache.meters()["target"] == plain.cache.meters()["target"]
    scope = paired.cache.scope("target")
    assert KeyStream(scope, range(12)).block_keys(0, 3) == raw_block_keys(plain.cache.scope("target"), range(12))


def test_trap_20_after_a_fork_and_a_rebase_the_draft_cells_are_ones_own() -> None:
    oracle = make_pair(span=2)
    serve(oracle, [*range(8), 50, 51, 52, 53])
    mine = [*range(8), 60, 61, 62, 63]
    for _ in range(2):
        request = start(oracle, mine)
        request.finish_prefill()
        for slot in range(len(mine) - 2):
            assert oracle.read(request.handle, "draft", slot) == tuple(mine[: slot + 3])
        request.end()
    # Both chains are there, each exact.
    for tokens in (mine, [*range(8), 50, 51, 52, 53]):
        assert tuple(tokens[:8]) in draft_cells(oracle) and tuple(tokens[:10]) in draft_cells(oracle)


def test_trap_23_the_source_of_a_partial_block_is_never_written() -> None:
    oracle = make_pair(span=0)
    serve(oracle, range(6), answer=[7, 8])
    published = {cell for pool in ("target", "draft") for _, _, cell in oracle.published(pool)}
    readers = [start(oracle, [*range(6), last]) for last in (50, 60)]
    assert [each.handle.cursor("target") for each in readers] == [6, 6]
    for reader in readers:
        reader.finish_prefill()
        reader.say([9, 9, 9])
    oracle.check_published()
    assert published <= {cell for pool in ("target", "draft") for _, _, cell in oracle.published(pool)}


def test_trap_25_rejected_drafts_are_never_published() -> None:
    oracle = make_pair()
    request = start(oracle, range(5))
    request.finish_prefill()
    for token in range(20):
        assert request.verify([90, 91, 92], [token], scratch=2)
        oracle.check_published()
    request.end()
    oracle.check_published()
    assert not any({90, 91, 92} & set(cell) for pool in ("target", "draft") for _, _, cell in oracle.published(pool))


def test_trap_27_other_spans_models_adapters_and_salts_share_nothing_in_the_draft() -> None:
    def scopes(span: int, model: str) -> tuple[bytes, bytes]:
        pair = (PoolSpec("target", 4, 8, model="t"), PoolSpec("draft", 4, 8, span, model=model))
        cache = PairedCache(*pair, Coupling.JOINT)
        return cache.scope("target").root(), cache.scope("draft").root()

    base, other_span, other_model = scopes(1, "d"), scopes(2, "d"), scopes(1, "e")
    assert base[0] == other_span[0] == other_model[0]
    assert len({base[1], other_span[1], other_model[1]}) == 3

    oracle = make_pair()
    serve(oracle, range(12))
    for options in ({"tenant_salt": b"x"}, {"lora": "x"}, {"contents": ((3, b"digest of an image"),)}):
        assert start(oracle, range(12), **options).handle.cursor("target") == 0
    plain = start(oracle, range(12), use_draft=False)
    assert plain.handle.cursor("target") == 11
