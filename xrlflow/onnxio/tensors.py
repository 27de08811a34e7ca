"""Constants whose data is not loaded: it stays in the mapped model file, in external data, or in memory."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from xrlflow.ir import SMALL, ArrayHandle, Const, DType, Leaves, TensorType, Value, digest, mix
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.malformed import reading
from xrlflow.onnxio.wire import EMBEDDED
from xrlflow.ops.tensors import numpy_dtype

# Large constants are first compared by this many bytes at three positions.
_SAMPLE = 4096
# The number of bytes compared at a time, so that comparing two mapped tensors needs little memory.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class MappedTensor:
    """A tensor whose bytes (little-endian, as ONNX stores them) are in a buffer that is not copied."""

    data: memoryview
    dtype: DType
    shape: tuple[int, ...]

    def numpy(self) -> npt.NDArray[Any]:
        if self.dtype.bits < 8:
            proto = onnx.TensorProto(data_type=int(self.dtype), dims=self.shape, raw_data=bytes(self.data))
            return onnx.numpy_helper.to_array(proto)
        return np.frombuffer(self.data, numpy_dtype(self.dtype)).reshape(self.shape)

    def raw(self) -> memoryview:
        return self.data


def raw_bytes(array: npt.NDArray[Any], dtype: DType) -> memoryview:
    """The bytes of an array as ONNX stores them, without a copy if possible. `dtype` is not STRING."""
    if dtype.bits < 8:
        return memoryview(onnx.numpy_helper.from_array(array).raw_data)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def tensor_proto(name: str, const: Const, data: bool = True) -> onnx.TensorProto:
    """A constant as a TensorProto: with its data, or (not `data`) without, so that the caller adds it."""
    if const.type.dtype == DType.STRING:
        return onnx.numpy_helper.from_array(const.numpy(), name)
    dims = const.type.shape or ()
    proto = onnx.TensorProto(
        name=name, data_type=int(const.type.dtype), dims=[d for d in dims if isinstance(d, int)]
    )
    if data:
        proto.raw_data = bytes(raw_data(const))
    return proto


def raw_data(const: Const) -> memoryview:
    """A constant's bytes as ONNX stores them."""
    handle = const.handle
    if isinstance(handle, MappedTensor):
        return handle.raw()
    return raw_bytes(const.numpy(), const.type.dtype)


def array_const(array: npt.NDArray[Any], dtype: DType) -> Const:
    """An array as a constant. The elements of a small constant can be read (but not written)."""
    data = np.asarray(array).view()
    data.flags.writeable = False
    return Const(TensorType(dtype, data.shape, True), ArrayHandle(data), data if data.size <= SMALL else None)


def _samples(const: Const) -> bytes:
    if const.type.dtype == DType.STRING:
        return repr(const.numpy().tolist()).encode("utf-8", "surrogateescape")
    raw = raw_data(const)
    if raw.nbytes <= 3 * _SAMPLE:
        return bytes(raw)
    middle = raw.nbytes // 2
    return b"".join(bytes(raw[at : at + _SAMPLE]) for at in (0, middle, raw.nbytes - _SAMPLE))


def same_content(a: Const, b: Const) -> bool:
    """Whether two constants of one type have the same bytes."""
    if a.type.dtype == DType.STRING:
        return bool(np.array_equal(a.numpy(), b.numpy()))
    x, y = raw_data(a), raw_data(b)
    if x.nbytes != y.nbytes:
        return False
    return all(x[i : i + _CHUNK] == y[i : i + _CHUNK] for i in range(0, x.nbytes, _CHUNK))


@dataclass(slots=True)
class ConstPool:
    """Gives equal large constants the same value. It first compares samples, and compares everything only if these are
    equal.
    """

    _buckets: dict[int, list[Const]] = field(default_factory=dict)

    def add(self, const: Const, leaves: Leaves) -> Value:
        """Add the constant to the leaves and return its value."""
        if const.array is not None:
            return leaves.intern(const.array, const.type.dtype)
        head = mix(digest(repr(const.type)), digest(_samples(const).hex()))
        bucket = self._buckets.setdefault(head, [])
        for at, pooled in enumerate(bucket):
            if pooled is const or same_content(pooled, const):
                return leaves.add_const(mix(head, at), pooled)
        bucket.append(const)
        return leaves.add_const(mix(head, len(bucket) - 1), const)


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.abspath(path), os.path.abspath(folder)]) == os.path.abspath(folder)


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """A file whose bytes are mapped. They stay the same if another file replaces this one, and change if it is written
    to. If the file became shorter, reading beyond its end kills the process.

    `state`: data that differs between versions of a file.
    """

    path: str
    data: memoryview
    descriptor: int  # open as long as `data` exists
    state: tuple[int, ...]

    @property
    def written(self) -> bool:
        """Whether this file was written to since it was mapped."""
        return _state(os.fstat(self.descriptor)) != self.state

    @property
    def current(self) -> bool:
        """Whether the path still leads to the file that was mapped."""
        try:
            return _state(os.stat(self.path)) == self.state
        except OSError:
            return False


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def map_file(path: str) -> MappedFile:
    """Map a file. Raises OSError, also for a pipe or a device."""
    # Without O_NONBLOCK, opening a pipe would wait until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        empty = status.st_size == 0
        data = memoryview(b"" if empty else mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(data, os.close, descriptor)
    return MappedFile(path, data, descriptor, _state(status))


@dataclass(slots=True)
class TensorStore:
    """Finds the data of a model's tensors. `data` is the serialised model, `path` its file, if it has one.

    `mapped`: the files that were mapped, the model's own first.
    """

    name: str
    data: memoryview
    path: str | None
    files: dict[str, memoryview] = field(default_factory=dict)
    mapped: list[MappedFile] = field(default_factory=list)

    @staticmethod
    def of_file(path: str) -> TensorStore:
        """The store of the model in a file. Raises OSError."""
        file = map_file(path)
        return TensorStore(path, file.data, path, mapped=[file])

    def check_unchanged(self, *, current: bool = False) -> None:
        """Raise ModelError if a mapped file was written to: some results would come from old weights, others from new
        ones.

        `current`: also raise it if the path now leads to another file, or to none.
        """
        for file in self.mapped:
            if file.written or (current and not file.current):
                raise ModelError(
                    f"{file.path}: the file has changed since it was read, so nothing was written: run it again"
                )

    def const(self, proto: onnx.TensorProto) -> Const:
        """A tensor as a constant. Raises ModelError if its data is missing, misplaced or too short, or if it has no
        type.
        """
        with reading(self.name, f"tensor {proto.name!r}"):
            return self._const(proto)

    def _const(self, proto: onnx.TensorProto) -> Const:
        if any(d < 0 for d in proto.dims):
            raise ValueError(f"dimensions {list(proto.dims)}")
        dtype = DType(proto.data_type)
        shape = tuple(proto.dims)
        if proto.data_location != onnx.TensorProto.EXTERNAL:
            if not proto.HasField("raw_data") or dtype.bits < 8 or dtype == DType.STRING:
                return array_const(onnx.numpy_helper.to_array(proto), dtype)
            data = memoryview(proto.raw_data)
        else:
            data = self._external(proto)
        expected = (prod(shape) * dtype.bits + 7) // 8
        if data.nbytes != expected:
            raise ModelError(
                f"{self.name}: tensor {proto.name!r} has {data.nbytes} bytes of data and needs {expected}: "
                "the file is damaged, export or download it again"
            )
        handle = MappedTensor(data, dtype, shape)
        small = handle.numpy() if prod(shape) <= SMALL else None
        return Const(TensorType(dtype, shape, True), handle, small)

    def check(self, proto: onnx.TensorProto) -> int:
        """The bytes of a tensor's data outside the model's own file. Raises as `const` does."""
        const = self.const(proto)
        inside = any(e.key == "location" and e.value == EMBEDDED for e in proto.external_data)
        return 0 if inside else const.type.nbytes or 0

    def fill(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Put back the data that `wire.strip_model` removed, in place, but not data that is external in the file
        itself.
        """
        for proto in tensors:
            entries = {e.key: e.value for e in proto.external_data}
            if entries.get("location") == EMBEDDED:
                data = self._external(proto)
                del proto.external_data[:]
                proto.ClearField("data_location")
                proto.raw_data = bytes(data)

    def _external(self, proto: onnx.TensorProto) -> memoryview:
        entries = {e.key: e.value for e in proto.external_data}
        location = entries.get("location", "")
        try:
            offset, length = int(entries.get("offset", "0")), int(entries.get("length", "-1"))
        except ValueError as error:
            raise ModelError(f"{self.name}: tensor {proto.name!r}: {error} in its external data") from error
        source = self.data if location == EMBEDDED else self.file(proto.name, location)
        if length < 0:
            dtype = DType(proto.data_type)
            length = (prod(proto.dims) * dtype.bits + 7) // 8
        if offset < 0 or offset + length > source.nbytes:
            raise ModelError(
                f"{self.name}: the external data file {location!r} is too short for tensor {proto.name!r}: "
                "copy it again, it belongs to the model"
            )
        return source[offset : offset + length]

    def file(self, tensor: str, location: str) -> memoryview:
        """The data file that a tensor names. Raises ModelError if it does not exist or is not in the model's folder."""
        if location in self.files:
            return self.files[location]
        if self.path is None:
            raise ModelError(
                f"{self.name}: tensor {tensor!r} is in the external file {location!r}: "
                "pass the model's path, or load its external data first"
            )
        folder = os.path.dirname(os.path.abspath(self.path))
        path = os.path.join(folder, location)
        roots = (os.path.realpath(folder), os.path.dirname(os.path.realpath(self.path)))
        if (
            not location
            or "\0" in location
            or os.path.isabs(location)
            or not _is_within(path, folder)
            or not any(_is_within(os.path.realpath(path), root) for root in roots)
        ):
            raise ModelError(
                f"{self.name}: tensor {tensor!r} points to {location!r}, outside the model's folder, which is "
                "refused: put the data file next to the model and write its bare name into it"
            )
        try:
            file = map_file(path)
        except OSError as error:
            raise ModelError(
                f"{self.name}: the external data file {location!r} cannot be read ({error.strerror}): "
                "put it next to the model"
            ) from error
        self.mapped.append(file)
        self.files[location] = file.data
        return file.data
