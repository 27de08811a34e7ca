"""The code of the fresh processes that compare two models. They are forked from a process that has imported their
modules.

Forking takes 2 ms; a new Python would take a quarter of a second. ONNX Runtime starts a thread when it is imported, and
a process with several threads cannot be forked safely, so each process imports ONNX Runtime itself (25 ms).

Two sessions of one model differ in speed because their weights lie at different addresses. Forked processes would all
have the same addresses, so each process first allocates memory in pieces of random sizes.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xrlflow.backends.onnxruntime.session import Optimization
from xrlflow.backends.onnxruntime.timing import Sample, sample
from xrlflow.backends.protocol import BackendError, Feeds, ModelSource
from xrlflow.backends.tvm import is_compiled
from xrlflow.backends.tvm.toolchain.import_tvm import tvm


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments that are the same in all processes of a comparison."""

    before: ModelSource
    after: ModelSource
    feeds: Feeds
    threads: int
    optimization: Optimization
    session_options: Mapping[str, str] | Any | None

    @property
    def portable(self) -> bool:
        """Whether the whole setup can be sent to another process."""
        return self.session_options is None or isinstance(self.session_options, Mapping)

    def sample(self, index: int, turns: int | None) -> Sample:
        """A sample of new sessions in this process. Every other sample (odd `index`) begins with the new model."""
        return sample(
            (self.before, self.after), self.feeds, turns=turns, swapped=index % 2 == 1, threads=self.threads,
            optimization=self.optimization, session_options=self.session_options,
        )  # fmt: skip


_setup: Setup | None = None
"""The setup that all processes share which are forked from this process."""


def prepare(setup: Setup) -> None:
    """Load what the processes of a comparison share, before they are forked. Models in memory are written to files."""
    global _setup
    before, after = _as_path(setup.before, "before.onnx"), _as_path(setup.after, "after.onnx")
    _setup = replace(setup, before=before, after=after)
    if is_compiled(before) or is_compiled(after):
        tvm()


def _as_path(model: ModelSource, name: str) -> str:
    if not isinstance(model, bytes):
        return os.path.abspath(model)
    path = Path(tempfile.gettempdir(), name)
    path.write_bytes(model)
    return str(path)


class Sampler:
    """The handler of a forked process: a task is the index of a sample and its number of turns."""

    def do(self, task: tuple[int, int | None]) -> Sample | BackendError:
        assert _setup is not None
        index, turns = task
        ballast = _ballast(index)
        try:
            return _setup.sample(index, turns)
        except BackendError as error:
            return BackendError(str(error))
        finally:
            del ballast


def _ballast(seed: int) -> tuple[mmap.mmap, list[bytearray]]:
    """Memory in pieces of random sizes (pages, blocks of the heap). It shifts the addresses of what is allocated
    next."""
    rng = random.Random(seed)
    pages = mmap.mmap(-1, mmap.PAGESIZE * rng.randint(1, 1 << 12))
    return pages, [bytearray(rng.randint(1 << 9, 1 << 15)) for _ in range(rng.randint(1, 100))]
