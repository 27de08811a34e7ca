"""Ctrl-C while foreign code calls back into Python."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if Ctrl-C was pressed in it and nobody is told.

    C++ code that calls back into Python gets the KeyboardInterrupt as an error like any other, and may take it for an
    answer: TVM's constant folding compiles, and for whatever is raised there it just does not fold.

    Interrupts are the main thread's; in others, and where a program handles them in its own way, this does nothing.
    """
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        usual(number, frame)

    try:
        signal.signal(signal.SIGINT, handle)
        yield
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        # Python handles what has arrived before it sets the new handler, and may raise here.
        while signal.getsignal(signal.SIGINT) is handle:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, usual)
    if interrupted:
        raise KeyboardInterrupt
