"""What the commands print: progress, the box, tables, figures."""

import io

import pytest
from rich.console import Console

from cluster.cli.answer import Answer
from cluster.cli.explain import decision_table
from cluster.cli.progress import Stages
from cluster.cli.render import answer_line, answers_table, cluster_box, lookahead, workers_table
from cluster.rpc._generated.tandem.v1 import tandem_pb2 as pb

COMPLETION = pb.Completion(
    usage=pb.Usage(prompt_tokens=100, completion_tokens=21),
    reuse=pb.Reuse(target_tokens=96, draft_tokens=95, joint_tokens=95),
    speculation=pb.SpeculationStats(steps=10, drafted_tokens=30, accepted_tokens=10, mean_acceptance_length=2.0),
    timings=pb.Timings(queue_s=0.1, time_to_first_token_s=0.5, total_s=2.5),
    worker_id="worker-1",
)
STATUS = pb.ClusterStatusResponse(
    model=pb.Model(
        name="tiny",
        max_len=512,
        vocab_size=2048,
        speculation_method="eagle3",
        num_speculative_tokens=3,
        lookahead_span=1,
        draft="tiny-eagle3",
    ),
    workers=[
        pb.Worker(
            worker_id="worker-0",
            state=pb.WORKER_STATE_READY,
            running_requests=1,
            pools=[
                pb.Pool(
                    name="target", block_size=16, total_blocks=64, free_blocks=50, cached_blocks=10, in_use_blocks=4
                ),
                pb.Pool(name="draft", block_size=8, total_blocks=128, free_blocks=128, bytes=3 << 20),
            ],
        )
    ],
    version="0.1.0",
    directory_up=True,
)


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_answer_takes_its_figures_from_the_completion() -> None:
    answer = Answer.of("text", COMPLETION)
    assert answer == Answer("worker-1", 100, 96, 95, 95, 2.0, 0.5, pytest.approx(10.0), "text")


def test_what_does_not_exist_is_no_number() -> None:
    completion = pb.Completion(usage=pb.Usage(prompt_tokens=9, completion_tokens=1), reuse=pb.Reuse(target_tokens=3))
    answer = Answer.of("", completion)
    assert (answer.acceptance, answer.tokens_per_s) == (None, 0.0)
    assert "reused 3 target / 0 draft / 0 joint; - tokens a step" in answer_line(answer)


def test_the_answers_table_has_a_row_for_each() -> None:
    text = shown(answers_table([Answer.of("a", COMPLETION), Answer.of("b", COMPLETION)]))
    assert text.count("worker-1") == 2
    assert "2.00" in text and "0.50" in text and "10.0" in text


def test_the_box_names_model_pools_span_and_endpoint() -> None:
    text = shown(cluster_box(STATUS, "127.0.0.1:50051"))
    for words in (
        "tiny, up to 512 tokens",
        "eagle3 by tiny-eagle3, 3 tokens drafted in each step",
        "64 blocks of 16 = 1,024 tokens",
        "128 blocks of 8 = 1,024 tokens, 3.0 MiB per worker",
        "1 token: where two prompts part, the draft can reuse 1 token less than the target",
        "grpc://127.0.0.1:50051",
    ):
        assert words in text


@pytest.mark.parametrize(("span", "words"), [(None, "no draft KV"), (0, "wherever target KV is"), (2, "2 tokens less")])
def test_the_span_says_what_it_costs(span: int | None, words: str) -> None:
    assert words in lookahead(pb.Model(lookahead_span=span))


def test_the_workers_table_shows_load_and_pools() -> None:
    text = shown(workers_table(STATUS.workers))
    assert "worker-0" in text and "ready" in text and "4 / 10 / 50" in text and "0 / 0 / 128" in text


def test_stages_are_one_line_each_and_a_failed_one_is_marked() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(RuntimeError), Stages(console) as stage:
        stage("First")
        stage("Second")
        raise RuntimeError
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("✓ First (") and second.startswith("✗ Second (")


def test_a_decision_is_a_row_for_each_candidate_and_a_reason_for_each_other() -> None:
    def priced(name: str, held: int, ms: float) -> pb.PricedWorker:
        cost = [pb.CostTerm(name="target_prefill", ms=ms), pb.CostTerm(name="queue", ms=2)]
        return pb.PricedWorker(worker_id=name, target_tokens=held, draft_tokens=held - 16, cost=cost)

    decision = pb.PlacementDecision(
        age_s=5,
        prompt_tokens=1200,
        worker_id="worker-1",
        candidates=[priced("worker-1", 1024, 176), priced("worker-0", 64, 1136)],
        passed_over=[pb.PassedOverWorker(worker_id="worker-2", reason="is suspect")],
    )
    text = shown(decision_table(decision))
    rows = [line.split() for line in text.splitlines() if "worker-" in line]
    assert rows[0] == ["worker-1", "1,024", "1,008", "176.0", "2.0", "178.0", "chosen"]
    assert rows[1][:3] == ["worker-0", "64", "48"]
    assert rows[2] == ["worker-2", "-", "-", "-", "-", "-", "is", "suspect"]
    assert "placed on worker-1 5 s ago; prompt of 1,200 tokens" in text
    assert "refused" in shown(decision_table(pb.PlacementDecision(age_s=1)))
