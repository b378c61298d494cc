"""The simulation as a whole: nothing is lost, nothing is left to chance, and routing matters where it should."""

import random
from pathlib import Path

import pytest

from cluster.bench.route.generators import GENERATORS
from cluster.bench.route.matrix import Setup, find_traces, run_matrix, workload_of
from cluster.bench.route.policies import DRAFT_BLIND, OURS, POLICIES
from cluster.bench.route.report import flat_keys, standings
from cluster.bench.route.request import Workload
from cluster.bench.route.simulation import Run, simulate
from cluster.bench.route.traces import read_azure, read_mooncake
from cluster.errors import ConfigError
from tests.unit.bench.route.builders import SPEC, request, workload

SETUP = Setup(workers=(4,), seeds=2, requests=160)


def run(policy: str, name: str = "agents", seed: int = 0, workers: int = 4) -> tuple[Workload, Run]:
    made = workload_of(SETUP, name, workers, seed)
    router = POLICIES[policy](workers, random.Random(seed), SETUP.spec, made.block_size)
    return made, simulate(made, workers, SETUP.spec, router)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_in_possible_times(policy: str) -> None:
    made, result = run(policy, "mixed")
    assert [outcome.request for outcome in result.outcomes] == list(made.requests)
    times = SETUP.spec.times
    for outcome in result.outcomes:
        asked = outcome.request
        lacking = asked.prompt_tokens - outcome.reused_joint
        assert outcome.reused_joint < asked.prompt_tokens
        assert outcome.ttft * 1000 + 1e-6 >= times.step_ms + times.prefill_ms(outcome.reused_joint, lacking)
        assert outcome.end_to_end >= outcome.ttft
        assert 0 <= outcome.worker < 4
    computed = [0.0] * 4
    for outcome in result.outcomes:
        lacking = outcome.request.prompt_tokens - outcome.reused_joint
        computed[outcome.worker] += times.prefill_ms(outcome.reused_joint, lacking)
    assert all(busy >= least for busy, least in zip(result.busy_ms, computed, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_runs(policy: str) -> None:
    assert run(policy) == run(policy)
    assert run(policy)[1] != run(policy, seed=1)[1]


def test_more_processes_change_no_figure() -> None:
    setup = Setup(workloads=("chat",), workers=(2, 4), policies=("round_robin", OURS), seeds=2, requests=60)
    assert run_matrix(setup) == run_matrix(setup, jobs=2)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_workload_is_made_as_demanded(name: str) -> None:
    made = workload_of(SETUP, name, 4, seed=3)
    arrivals = [each.at for each in made.requests]
    assert arrivals == sorted(arrivals)
    assert [each.number for each in made.requests] == list(range(len(made.requests)))
    assert 0.6 * SETUP.demand(4).requests < len(made.requests) < 1.3 * SETUP.demand(4).requests
    for each in made.requests:
        assert len(each.prompt) == each.prompt_tokens // made.block_size
        assert each.whole[: len(each.prompt)] == each.prompt
        assert list(each.whole) == sorted(each.whole), "a block's number is larger than its parent's"
    plain = sum(not each.speculative for each in made.requests)
    assert (plain > 0) == (name in ("tenants", "mixed"))


def test_where_prefixes_are_shared_our_router_has_the_lowest_ttft() -> None:
    setup = Setup(workloads=("chat", "forks", "mixed"), workers=(8,), seeds=2, requests=600)
    results = run_matrix(setup)
    for standing in standings(results):
        assert standing.mean < 1.0, standing
        assert standing.p99 <= 1.02, standing
    mixed = next(standing for standing in standings(results) if standing.workload == "mixed")
    assert mixed.draft_blind is not None and mixed.draft_blind < 0.95, "knowing draft pools pays"
    keys = flat_keys(results)
    for policy in POLICIES:
        for figure in ("ttft_mean", "ttft_p99", "goodput", "reuse_joint", "imbalance"):
            assert keys[f"route.chat.8.{policy}.{figure}"] >= 0
    assert keys[f"route.mixed.8.{OURS}.ttft_mean_vs_{DRAFT_BLIND}"] == mixed.draft_blind


def test_a_request_that_no_pool_can_hold_is_refused_before_it_waits_for_ever() -> None:
    too_long = workload(request(prompt=range(200)))
    with pytest.raises(ConfigError, match=r"20,051 tokens.*10,000"):
        simulate(too_long, 2, SPEC, POLICIES["round_robin"](2, random.Random(0), SPEC, 100))


def test_a_trace_is_read_and_scaled_to_the_load(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "azure").mkdir()
    lines = [
        f'{{"timestamp": {1000 * n}, "input_length": {700 + n}, "output_length": 9, "hash_ids": [0, {n + 1}]}}'
        for n in range(300)
    ]
    (tmp_path / "mooncake" / "toolagent_trace.jsonl").write_text("\n".join(lines))
    (tmp_path / "azure" / "AzureTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:00:{n:02}.6805900,{100 + n},{n}\n" for n in range(60))
    )
    traces = find_traces(tmp_path)
    assert [name for name, _ in traces] == ["toolagent", "toolagent_mixed", "azure_conv"]
    setup = Setup(traces=traces, requests=50)
    shared = workload_of(setup, "toolagent", 8, 0)
    assert len(shared.requests) == 50
    assert all(each.prompt == (0,) for each in shared.requests), "the last block isn't full"
    mixed = workload_of(setup, "toolagent_mixed", 8, 0)
    assert 5 < sum(not each.speculative for each in mixed.requests) < 28
    unique = workload_of(setup, "azure_conv", 8, 0)
    assert len({block for each in unique.requests for block in each.prompt}) == sum(
        len(each.prompt) for each in unique.requests
    )
    twice = workload_of(Setup(traces=traces, requests=50, load=1.2), "azure_conv", 8, 0)
    assert twice.requests[-1].at == pytest.approx(unique.requests[-1].at / 2)


def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*bad\.jsonl"):
        read_mooncake(bad)
    with pytest.raises(ConfigError, match=r"line 2 of .*bad\.jsonl"):
        read_azure(bad)
