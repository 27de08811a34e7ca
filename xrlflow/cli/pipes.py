"""Reads models from standard input and writes results to standard output: the path of both is `-`."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from xrlflow.cli.failures import fail, output_failed
from xrlflow.storage.files import MAX_BYTES, StandardInput

PIPE = Path("-")
_PART = 1 << 20


def source(path: Path, *others: Path | None) -> Path | StandardInput:
    """The file at a path. `-` means standard input; in this case none of the `others` may be `-`."""
    if path != PIPE:
        return path
    if PIPE in others:
        fail("standard input can be read only once: name a file for the other model")
    check_streams(path)
    try:
        read = io.BytesIO()
        while part := sys.stdin.buffer.read(_PART):
            read.write(part)
            if read.tell() > MAX_BYTES:
                fail("-: standard input is too long for an ONNX file, or does not end: name a file")
    except OSError as error:
        fail(f"-: standard input cannot be read ({error.strerror}): pipe a file into it, or name one")
    return StandardInput(read.getvalue())


def check_streams(read: Path | None = None, written: Path | None = None) -> None:
    """Refuse `-` if standard input or output is closed or is a terminal. This check is quick, so commands begin with
    it.
    """
    if read == PIPE and (sys.stdin is None or sys.stdin.isatty()):
        what = "closed" if sys.stdin is None else "a terminal"
        fail(f"-: standard input is {what}: pipe a file into it, or name one")
    if written == PIPE and (sys.stdout is None or sys.stdout.isatty()):
        what = "closed" if sys.stdout is None else "a terminal, and no place for a file"
        fail(f"-o -: standard output is {what}: redirect it, or name a file")


def check_files(why: str, *paths: Path | None) -> None:
    """Refuse `-` where a real file is needed. `why` is the beginning of the message."""
    if PIPE in paths:
        fail(f"-: {why}: name a file")


class Output:
    """The destination of a result: a file or standard output. In the latter case all printing goes to standard
    error."""

    def __init__(self, path: Path) -> None:
        check_streams(written=path)
        self.path = None if path == PIPE else path
        self._stream: BinaryIO | None = None
        if self.path is None:
            # Text that libraries and child processes print must not get between the bytes of the result, either.
            sys.stdout.flush()
            self._stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
            os.dup2(2, sys.stdout.fileno())

    def __str__(self) -> str:
        return "standard output" if self.path is None else str(self.path)

    def put(self, save: Callable[[Path], None]) -> None:
        """Call `save` with the path, or with a temporary file that is then copied to standard output."""
        if self.path is not None:
            save(self.path)
            return
        assert self._stream is not None
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
            file = Path(folder) / "output"
            save(file)
            if len(os.listdir(folder)) > 1:
                fail("-o -: the result needs a second file for its weights: name a file")
            try:
                with file.open("rb") as saved:
                    shutil.copyfileobj(saved, self._stream)
                self._stream.flush()
            except OSError as error:
                output_failed(error, self._stream.fileno())


def one_file(model: Path, *, compiled: bool, hybrid: bool) -> None:
    """Refuse standard output for a result of several files: a library, kernels, or weights next to the model."""
    from xrlflow.onnxio import data_files

    if compiled:
        fail("-o -: a compiled model is a library with a description beside it: name a file")
    if hybrid:
        fail("-o -: kernels are a library beside the model: name a file, or choose another --backend")
    if weights := data_files(str(model)):
        fail(f"-o -: {model} has weights in {min(weights)}, and a pipe takes one file: name a file")
