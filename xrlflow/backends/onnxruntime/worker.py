"""Fresh processes that compare two models: `python -m xrlflow.backends.onnxruntime.worker FOLDER`.

This process, the nursery, imports what all need and forks a child for each request: 2 ms instead of the quarter of a
second that Python takes to start. It has one thread, so that a fork is sound: ONNX Runtime starts one when it is
imported, so each child imports that itself (25 ms). Children of one process would have the same addresses; where
weights lie is what makes one session faster than another of the same model, so each child first takes memory in pieces
of random sizes, and what it loads then lies elsewhere.

FOLDER has setup.json and feeds.npz. A request is a line of JSON on standard input, the answer one on standard output:
{"sample": ...}, {"error": one line} or {"status": what the child ended with}. At the end of the input it leaves.
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
from xrlflow.backends.tvm.import_tvm import tvm


def main(setup_folder: str) -> None:
    """Serve requests until there are no more."""
    folder = Path(setup_folder)
    setup = json.loads((folder / "setup.json").read_text())
    feeds = load_feeds(folder / "feeds.npz", setup["feeds"])
    if any(is_compiled(model) for model in setup["models"]):
        tvm()
    gc.collect()
    gc.freeze()  # what is there already is no business of a child's collector: pages stay shared
    while line := _next_line():
        answer = _in_a_child(setup, feeds, json.loads(line))
        if answer is None:
            break
        os.write(1, answer + b"\n")


def _next_line() -> bytes:
    """A request; empty at the end. Read without a buffer, so that `select` knows whether there is more."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _in_a_child(setup: dict[str, Any], feeds: Feeds, request: dict[str, Any]) -> bytes | None:
    """The answer of a fork of this process; None if whoever asked is gone."""
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
            if 0 in ready:  # nobody asks before there is an answer: the other side is gone
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
    """Memory in pieces of random sizes: pages, and blocks of the heap."""
    rng = random.Random(seed)
    pages = mmap.mmap(-1, mmap.PAGESIZE * rng.randint(1, 1 << 12))
    return pages, [bytearray(rng.randint(1 << 9, 1 << 15)) for _ in range(rng.randint(1, 100))]
