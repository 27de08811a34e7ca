"""Handles Ctrl-C and SIGTERM while foreign code (TVM) calls back into Python and may catch their exceptions."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

COMPILING = "xrlflow-compiling"
"""The first part of the names of threads that compile. Nothing can stop them: TVM cannot be interrupted."""


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if Ctrl-C was pressed inside it and foreign code caught the
    exception.

    C++ code that calls back into Python sees the KeyboardInterrupt as an ordinary error and may handle it: when TVM's
    constant folding catches an exception, it just does not fold. The same holds for an exception that the program's own
    handler of SIGTERM raises.

    Only the main thread gets interrupts. In other threads this does nothing. Nor does it change a signal that the
    program does not handle in Python's usual manner.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        usual[signal.SIGINT] = signal.default_int_handler
    ending = signal.getsignal(signal.SIGTERM)
    if callable(ending):
        usual[signal.SIGTERM] = ending
    arrived: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        usual[number](number, frame)

    try:
        for number in usual:
            signal.signal(number, handle)
        yield
    except Exception as error:
        if arrived:
            try:
                usual[max(arrived)](max(arrived), None)
            except BaseException as interrupt:
                raise interrupt from error
        raise
    finally:
        # Python handles pending signals before it sets the new handler, and may raise KeyboardInterrupt here.
        for number in usual:
            while signal.getsignal(number) is handle:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    signal.signal(number, usual[number])
    if arrived:  # SIGTERM wins over Ctrl-C
        usual[max(arrived)](max(arrived), None)
