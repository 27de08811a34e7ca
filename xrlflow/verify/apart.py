"""Runs models in a process of its own: at a size of 0, some kernels of ONNX Runtime divide by zero and crash.

Other kernels return uninitialised memory. The process fills new memory with a pattern, so that such results are never
right by chance. One process serves all runs and is started again after a crash.
"""

from __future__ import annotations

import atexit
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from xrlflow.backends.children import command, environment
from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError
from xrlflow.verify.runner import Model, first_line, opened

# Seconds for starting the process and one run together.
_LIMIT = 60.0
_HEADER = 8
# The GNU C library fills new memory with the complement of this byte: every float becomes -0.37.
_FILLED = {"MALLOC_PERTURB_": "65"}

_process: subprocess.Popen[bytes] | None = None


def run_apart(
    model: Model,
    feeds: Mapping[str, Any],
    *,
    threads: int | None = None,
    session_options: Options | None = None,
) -> list[Any]:
    """The outputs of one run. Raises BackendError, also if the run crashes its process or takes too long."""
    if session_options is not None and not isinstance(session_options, Mapping):
        raise BackendError("session options that are an object cannot be handed to another process")
    source = model if isinstance(model, (str, os.PathLike, bytes)) else model.SerializeToString()
    options = None if session_options is None else dict(session_options)
    request = pickle.dumps((source, dict(feeds), threads, options), pickle.HIGHEST_PROTOCOL)
    process = _started()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(_HEADER, "little") + request)
        process.stdin.flush()
        answer = _read(process.stdout, time.monotonic() + _LIMIT)
    except OSError as error:
        stop()
        raise BackendError(f"ONNX Runtime ends the process: {first_line(error)}") from error
    if answer is None:
        stop()
        raise BackendError("ONNX Runtime ends the process, or does not end")
    outputs, reason = pickle.loads(answer)
    if reason:
        raise BackendError(reason)
    return list(outputs)


def stop() -> None:
    """End the process if it runs."""
    global _process
    if _process is not None:
        _process.kill()
        _process.wait()
        for pipe in (_process.stdin, _process.stdout):
            if pipe is not None:
                pipe.close()
        _process = None


atexit.register(stop)


def _started() -> subprocess.Popen[bytes]:
    global _process
    if _process is None or _process.poll() is not None:
        stop()
        _process = subprocess.Popen(
            command(__name__, serve.__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(**_FILLED),
            bufsize=0,
        )
    return _process


def _read(pipe: IO[bytes], until: float) -> bytes | None:
    """One message; None if the other side has ended or time is up."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        data, wanted = b"", _HEADER
        while len(data) < wanted:
            if not selector.select(max(0.0, until - time.monotonic())):
                return None
            part = os.read(pipe.fileno(), 1 << 20)
            if not part:
                return None
            data += part
            if len(data) >= _HEADER and wanted == _HEADER:
                wanted += int.from_bytes(data[:_HEADER], "little")
        return data[_HEADER:]


def serve() -> None:
    """Answer requests until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    while header := source.read(_HEADER):
        model, feeds, threads, options = pickle.loads(source.read(int.from_bytes(header, "little")))
        answer: tuple[list[Any], str] = ([], "")
        try:
            with opened(model, threads=threads, session_options=options) as runner:
                answer = (runner.run(feeds), "")
        except BackendError as error:
            answer = ([], str(error))
        raw = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        sink.write(len(raw).to_bytes(_HEADER, "little") + raw)
        sink.flush()
