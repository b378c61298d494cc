"""Signals while a cluster starts and stops: none is lost, and none interrupts the clean-up."""

import signal
import threading
from collections.abc import Iterator

import pytest

from actors.signals import Interrupts, uninterrupted


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Swallows:
    """Interrupted in its finalizer, where Python drops exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_raised_by_the_next_check() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        Swallows()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_an_interrupt_is_raised_where_it_comes() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_handler_of_the_callers_is_kept_and_used(number: signal.Signals) -> None:
    seen: list[int] = []
    signal.signal(number, lambda number, frame: seen.append(number))
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        interrupts.check()
    assert seen == [number, number]


def test_nothing_interrupts_the_clean_up() -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_signals_alone() -> None:
    def start_and_stop() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
        with uninterrupted():
            pass
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=start_and_stop)
    thread.start()
    thread.join()
    assert done == [True]
