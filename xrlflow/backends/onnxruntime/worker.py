"""Fresh processes that compare two models: `python -m xrlflow.backends.onnxruntime.worker FOLDER`.

This process is a fork server. It imports what all comparisons need and forks a child for each request, which takes
2 ms; a new Python would take a quarter of a second. It has a single thread, because a process with several cannot be
forked safely. ONNX Runtime starts a thread when it is imported, so each child imports it itself (25 ms).

Two sessions of one model differ in speed because their weights lie at different addresses. Forked children would all
have the same addresses, so each child first allocates memory in pieces of random sizes.

FOLDER has setup.json and feeds.npz. A request is a line of JSON on standard input. The answer is a line of JSON on
standard output: {"sample": ...}, {"error": one line} or {"status": the child's exit status}. The process exits at the
end of its input.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import Any

from xrlflow.backends.onnxruntime.session import Optimization
from xrlflow.backends.onnxruntime.timing import sample
from xrlflow.backends.onnxruntime.wire import load_feeds, to_json
from xrlflow.backends.protocol import BackendError, Feeds
from xrlflow.backends.tvm import is_compiled
from xrlflow.backends.tvm.toolchain.import_tvm import tvm


def main(setup_folder: str) -> None:
    """Serve requests until there are no more."""
    folder = Path(setup_folder)
    setup = json.loads((folder / "setup.json").read_text())
    feeds = load_feeds(folder / "feeds.npz", setup["feeds"])
    if any(is_compiled(model) for model in setup["models"]):
        tvm()
    gc.collect()
    gc.freeze()  # a child's collector does not touch these objects, so their pages stay shared
    while line := _next_line():
        answer = _in_a_child(setup, feeds, json.loads(line))
        if answer is None:
            break
        os.write(1, answer + b"\n")


def _next_line() -> bytes:
    """The next request; empty at the end of the input. It is read without a buffer: `select` must see what is left."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _in_a_child(setup: dict[str, Any], feeds: Feeds, request: dict[str, Any]) -> bytes | None:
    """The answer of a forked child; None if the process that asked has gone."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(_answer(setup, feeds, request))
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(write)
    answer = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([read, 0], [], [])
            if 0 in ready:  # no request comes before the answer, so this is the end of the input
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            part = pipe.read(1 << 16)
            if not part:
                break
            answer += part
    _, status = os.waitpid(child, 0)
    if status == 0:
        return answer
    return json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode()


def _answer(setup: dict[str, Any], feeds: Feeds, request: dict[str, Any]) -> bytes:
    before, after = setup["models"]
    ballast = _ballast(request["seed"])
    try:
        found = sample(
            (before, after),
            feeds,
            turns=request["turns"],
            swapped=request["swapped"],
            threads=setup["threads"],
            optimization=Optimization(setup["optimization"]),
            session_options=setup["session_options"],
        )
    except BackendError as error:
        return json.dumps({"error": str(error)}).encode()
    finally:
        del ballast
    return json.dumps({"sample": to_json(found)}).encode()


def _ballast(seed: int) -> tuple[mmap.mmap, list[bytearray]]:
    """Memory in pieces of random sizes (pages, blocks of the heap). It shifts the addresses of what is loaded next."""
    rng = random.Random(seed)
    pages = mmap.mmap(-1, mmap.PAGESIZE * rng.randint(1, 1 << 12))
    return pages, [bytearray(rng.randint(1 << 9, 1 << 15)) for _ in range(rng.randint(1, 100))]
