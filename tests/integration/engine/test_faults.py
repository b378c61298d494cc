"""Faults stay with the requests they hit: the engine lives, and both pools return to where they were."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.request import FinishReason
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.runner import ForwardOutput, PagedModel
from cluster.errors import Internal, InvalidRequest
from tests.integration.engine.support import eight_prompts, greedy, make_engine, reference, requests, run_all

METHODS = ["none", "ngram", "draft_model", "eagle3"]
COUNT = 9
SAMPLING = greedy(COUNT, ignore_eos=True)


def in_use(engine: Engine) -> dict[str, tuple[int, int]]:
    return {name: (meters.in_use, meters.reserved) for name, meters in engine.stats().pools.items()}


def assert_idle_and_well(engine: Engine) -> None:
    """Nothing is held, and the engine still answers as transformers would."""
    assert set(in_use(engine).values()) == {(0, 0)}
    engine.parts.cache.check()
    prompts = eight_prompts()[:3]
    for prompt, event in zip(prompts, engine.generate(requests(prompts, SAMPLING, "after")), strict=True):
        assert event.token_ids == reference(prompt, 20).tokens[:COUNT]


def collect(engine: Engine, events: dict[str, RequestEvent]) -> None:
    """One step; `events` holds what has happened to each request so far, as one event."""
    for event in engine.step():
        before = events.get(event.request_id)
        events[event.request_id] = event if before is None else before.then(event)


def drain(engine: Engine, events: dict[str, RequestEvent] | None = None) -> dict[str, RequestEvent]:
    events = {} if events is None else events
    while engine.has_work():
        collect(engine, events)
    return events


def on_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, fault: Callable[[Any], Any]) -> None:
    """Let the `at`-th call of `owner.name` return `fault(what it returned)`; other calls are left alone."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return fault(result) if next(calls) == at else result

    monkeypatch.setattr(owner, name, call)


def explode(_: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("where", ["forward", "sample", "propose"])
def test_exception_in_a_step_fails_its_batch_only(
    method: str, at: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "propose" and method == "none":
        pytest.skip("nothing proposes")
    engine = make_engine(method, chunk=32, max_batch=4)
    run_all(engine, eight_prompts()[:2], SAMPLING)
    with monkeypatch.context() as patch:
        if where == "forward":
            on_call(patch, PagedModel, "forward", at, explode)
        elif where == "sample":
            on_call(patch, engine.parts.runner._sampler, "sample", at, explode)
        else:
            on_call(patch, engine.parts.drafter, "propose", at, explode)
        for request in requests(eight_prompts(), SAMPLING):
            engine.add(request)
        events = drain(engine)
    failed = [event for event in events.values() if event.finish is FinishReason.ERROR]
    done = [event for event in events.values() if event.finish is FinishReason.LENGTH]
    assert 1 <= len(failed) <= 4
    assert len(failed) + len(done) == 8
    assert all(isinstance(event.error, Internal) and event.usage is not None for event in failed)
    assert all("injected" not in str(event.error) for event in failed)
    for event in done:
        assert event.token_ids == reference(eight_prompts()[int(event.request_id[1:])], 20).tokens[:COUNT]
    assert engine.stats().failed_steps == 1
    assert_idle_and_well(engine)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_one_request(
    method: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(method)

    def spoil_first_row(output: ForwardOutput) -> ForwardOutput:
        logits = output.logits.clone()
        logits[0] = value
        return ForwardOutput(logits, output.hidden)

    with monkeypatch.context() as patch:
        on_call(patch, engine.parts.runner._target, "forward", 3, spoil_first_row)
        for request in requests(eight_prompts(), SAMPLING):
            engine.add(request)
        events = drain(engine)
    failed = [event for event in events.values() if event.finish is FinishReason.ERROR]
    assert len(failed) == 1
    for event in events.values():
        if event.finish is not FinishReason.ERROR:
            assert event.token_ids == reference(eight_prompts()[int(event.request_id[1:])], 20).tokens[:COUNT]
    assert_idle_and_well(engine)


def test_nan_in_kv_does_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose own KV became NaN fails; its blocks, given to others, do no harm."""
    engine = make_engine("none", reuse=False, kv_bytes=2048 * 16 * 12)
    victim, *others = requests(eight_prompts()[5:8], SAMPLING)
    engine.add(victim)
    engine.step()
    request = engine.parts.admission._running[victim.request_id]
    assert request.handle is not None
    for tensor in engine.parts.kv["target"].keys:
        tensor[list(request.handle.block_table("target"))] = float("nan")
    events = drain(engine)
    assert events[victim.request_id].finish is FinishReason.ERROR
    assert all(tensor.isfinite().all() for kv in engine.parts.kv.values() for tensor in (*kv.keys, *kv.values))
    for prompt, event in zip(eight_prompts()[6:8], engine.generate(others), strict=True):
        assert event.token_ids == reference(prompt, 20).tokens[:COUNT]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_cancel_in_every_phase(method: str, steps: int) -> None:
    """Waiting, in the first chunk, in a later one, decoding: the blocks are back at once, and the others go on."""
    engine = make_engine(method, chunk=32, max_batch=4)
    for request in requests(eight_prompts(), SAMPLING):
        engine.add(request)
    events = {f"r{i}": RequestEvent(f"r{i}") for i in range(8)}
    for _ in range(steps):
        collect(engine, events)
    running = [request_id for request_id in ("r0", "r7") if events[request_id].finish is None]
    for request_id in ("r0", "r0", "r7", "never heard of"):
        engine.cancel(request_id)
    engine.parts.cache.check()
    drain(engine, events)
    assert "r7" in running
    for request_id, event in events.items():
        assert event.finish is (FinishReason.CANCELLED if request_id in running else FinishReason.LENGTH)
        assert event.token_ids == reference(eight_prompts()[int(request_id[1:])], 20).tokens[: len(event.token_ids)]
    assert_idle_and_well(engine)


def test_cancel_all_and_close() -> None:
    engine = make_engine("eagle3")
    for request in requests(eight_prompts(), SAMPLING):
        engine.add(request)
    engine.step()
    engine.cancel_all()
    assert {event.finish for event in engine.step()} == {FinishReason.CANCELLED}
    assert not engine.has_work()
    assert_idle_and_well(engine)


def test_an_id_can_be_used_again_once_its_end_was_told() -> None:
    engine = make_engine("ngram")
    first, second = (requests([prompt], SAMPLING)[0] for prompt in eight_prompts()[:2])
    engine.add(first)
    engine.step()
    engine.cancel("r0")
    with pytest.raises(InvalidRequest, match="request_id is r0"):
        engine.add(second)  # else its reader would be told that it was cancelled
    assert [event.finish for event in engine.step()] == [FinishReason.CANCELLED]
    (event,) = engine.generate([second])
    assert event.token_ids == reference(eight_prompts()[1], 20).tokens[:COUNT]


def test_deadline_that_has_passed() -> None:
    engine = make_engine("none")
    engine.add(EngineRequest("late", eight_prompts()[0], SAMPLING, deadline=0.0))
    (event,) = engine.step()
    assert event.finish is FinishReason.DEADLINE
    assert_idle_and_well(engine)


def test_a_defect_in_planning_fails_what_is_there_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("eagle3")
    for request in requests(eight_prompts(), SAMPLING):
        engine.add(request)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.admission, "plan", explode)
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
        events = engine.fail_all()
    assert {event.finish for event in events} == {FinishReason.ERROR}
    assert len(events) == 8
    assert_idle_and_well(engine)
