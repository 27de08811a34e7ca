"""Interrupts (Ctrl-C, SIGTERM) that foreign code swallows."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

import pytest

from xrlflow.backends.interrupts import heeding_interrupts

pytestmark = pytest.mark.usefixtures("python_handles_interrupts")


def swallow() -> None:
    """Swallow an interrupt, as constant folding does."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_swallowed_interrupt_comes_at_the_end() -> None:
    reached = []

    @heeding_interrupts()
    def block() -> None:
        swallow()
        reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["the end"]


def test_an_interrupt_that_became_an_error_is_one_again() -> None:
    @heeding_interrupts()
    def block() -> None:
        swallow()
        raise RuntimeError("an error in a callback")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_one_that_arrives_arrives_at_once() -> None:
    @heeding_interrupts()
    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the interrupt came late")

    with pytest.raises(KeyboardInterrupt):
        block()


def test_one_that_arrives_while_the_handler_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises the interrupt in `signal.signal` itself, so the statements after it do not run."""
    put, late = signal.signal, [True]

    def interrupted(number: int, handler: Any) -> Any:
        if handler is signal.default_int_handler and late:
            late.clear()
            signal.raise_signal(signal.SIGINT)
        return put(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)

    @heeding_interrupts()
    def block() -> None:
        pass

    with pytest.raises(KeyboardInterrupt):
        block()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_swallowed_end_comes_at_the_end() -> None:
    """SIGTERM raises SystemExit if the program has a handler that does so, like the command line. Here it follows a
    swallowed Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    @heeding_interrupts()
    def block(error: Exception | None) -> None:
        swallow()
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        if error is not None:
            raise error

    original = signal.signal(signal.SIGTERM, end)
    try:
        for error in (None, RuntimeError("an error in a callback")):
            with pytest.raises(SystemExit, match="143"):
                block(error)
            assert signal.getsignal(signal.SIGTERM) is end
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, original)


def test_errors_without_an_interrupt_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="of its own"), heeding_interrupts():
        raise RuntimeError("of its own")
    with heeding_interrupts():
        pass


def test_a_block_in_another_is_its_business() -> None:
    @heeding_interrupts()
    def block() -> None:
        with heeding_interrupts():
            pass
        swallow()

    with pytest.raises(KeyboardInterrupt):
        block()


def test_a_program_that_handles_interrupts_itself_is_left_alone() -> None:
    seen = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, handle)
    with heeding_interrupts():
        assert signal.getsignal(signal.SIGINT) is handle
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_have_no_interrupts() -> None:
    errors = []

    def run() -> None:
        try:
            with heeding_interrupts():  # setting a handler here would raise ValueError
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
