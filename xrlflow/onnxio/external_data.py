"""Replaces a model together with its data files.

The data of a model `out.onnx` is in `out.onnx.DIGEST.data`, where DIGEST is computed from the content. So no data file
is ever overwritten. The old model has its data until the new model, whose data is then complete, replaces it in one
step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from xrlflow.onnxio import protos
from xrlflow.onnxio.tensors import map_file
from xrlflow.onnxio.wire import EMBEDDED, WireError, strip_model
from xrlflow.storage import files

_SUFFIX = ".data"
# Old data files stay if more bytes than this would have to be searched for other models that use them.
_SEARCHED = 1 << 32
_CHUNK = 1 << 22

Write = Callable[[BinaryIO], None]


@contextmanager
def replacing_model(
    path: files.Path, data: Iterable[Write], *, durable: bool = True
) -> Iterator[tuple[BinaryIO, list[str]]]:
    """Yields a file for the new model, which replaces `path` at the end of the block, and the names of its data files.

    Each function in `data` writes one data file; all are complete before the block begins. If writing or the block
    fails, nothing has changed. Data files that only the replaced model used are removed. Raises OSError.
    """
    target = files.destination(path)
    folder = os.path.dirname(target)
    old = data_files(target)
    names: list[str] = []
    created: list[str] = []
    with files.NewFile(folder, durable=durable) as model:
        try:
            for write in data:
                names.append(_write(target, write, created, durable))
            yield model.file, names
            model.replace(target)
        finally:
            if not model.is_at(target):
                for name in created:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
    for location in sorted(old - set(names)):
        if _is_exclusive(target, location):
            with contextlib.suppress(OSError):  # if it cannot be removed, the old data only takes space
                os.unlink(os.path.join(folder, location))


def _write(target: str, write: Write, created: list[str], durable: bool) -> str:
    """Write one data file and return its name. If it is new, its path is added to `created`."""
    folder, name = os.path.split(target)
    with files.NewFile(folder, durable=durable) as new:
        sink = _DigestedFile(new.file)
        write(sink)  # type: ignore[arg-type]
        base = stem = f"{_stem(name)}.{sink.digest.hexdigest()}"
        while not new.claim(path := os.path.join(folder, base + _SUFFIX)):
            if _same(path, new.file):  # an earlier model had the same weights
                return base + _SUFFIX
            base = f"{stem}-{secrets.token_hex(4)}"
        created.append(path)
    return base + _SUFFIX


def _stem(name: str) -> str:
    """The beginning of a data file's name: the model's file name, made valid text and shortened if necessary."""
    try:
        return name if len(name.encode()) <= 200 else "model"
    except UnicodeEncodeError:  # file names are bytes, names in a model are text
        return "model"


class _DigestedFile:
    """A file for writing that computes a digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = blake2b(digest_size=8)

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _same(path: str, file: BinaryIO) -> bool:
    """Whether there is a regular file at the path with the same content as `file`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return False
    file.seek(0)
    with open(path, "rb") as existing:
        while True:
            a, b = file.read(_CHUNK), existing.read(_CHUNK)
            if a != b:
                return False
            if not a:
                return True


def data_files(path: str) -> set[str]:
    """The data files that a model names; none if the file is not a model."""
    try:
        proto = onnx.ModelProto.FromString(strip_model(map_file(path).data))
    except (OSError, WireError, DecodeError):
        return set()
    locations = {
        entry.value for t in protos.all_tensors(proto) for entry in t.external_data if entry.key == "location"
    }
    return locations - {EMBEDDED}


def relocate(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Change the names of data files in a model, in place."""
    for tensor in protos.all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names.get(entry.value, entry.value)


def _is_exclusive(target: str, location: str) -> bool:
    """Whether a data file belongs only to the model at `target`: by its name, and because no other file in the folder
    names it.

    All files are searched for the name, since a model's file may have any name.
    """
    folder, name = os.path.split(target)
    path = os.path.join(folder, location)
    if os.path.basename(location) != location or not location.endswith(_SUFFIX):
        return False
    if not location.startswith((f"{name}.", f"{_stem(name)}.")) or location in data_files(target):
        return False
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with os.scandir(folder) as entries:
            siblings = [e for e in entries if e.path not in (path, target) and e.is_file()]
        if sum(e.stat().st_size for e in siblings) > _SEARCHED:
            return False
        return not any(_mentions(e.path, location.encode()) for e in siblings)
    except OSError:
        return False


def _mentions(path: str, word: bytes) -> bool:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(word) >= 0
