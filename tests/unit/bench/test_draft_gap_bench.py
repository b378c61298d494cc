"""`tandem bench gap` on the tiny models: the choices differ in what they are said to differ in."""

from cluster.bench.draft_gap import TINY_QUESTIONS, GapCase, run_gap_bench
from cluster.bench.engine import BenchModel
from tests.fixtures.prompts import TINY_EAGLE3, TINY_TARGET


def test_a_gap_that_is_left_gives_the_first_token_sooner_and_is_counted() -> None:
    model = BenchModel("tiny", TINY_TARGET, TINY_EAGLE3, questions=TINY_QUESTIONS)
    figures = run_gap_bench(model, GapCase(context=600, new_tokens=8, rounds=2, threads=1), lambda _: None)
    assert {key.rsplit(".", 1)[1] for key in figures} == {"ttft", "acceptance", "total", "skipped"}
    assert figures["draft_gap.skip.ttft"] < figures["draft_gap.clip.ttft"] / 2, "one token against 600"
    assert figures["draft_gap.clip.skipped"] == 0
    assert figures["draft_gap.skip.skipped"] == 1
    assert all(1 <= figures[f"draft_gap.{choice}.acceptance"] <= 4 for choice in ("clip", "skip", "auto"))
