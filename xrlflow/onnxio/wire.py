"""Reads and writes protocol buffers as bytes, so that weights are neither parsed nor copied.

A serialised model is split into a small model without the large tensors, and the position of each large tensor. The
large tensors are not moved (they may be in a mapped file, for instance). Encoding:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

# A tensor whose data is shorter than this stays in the small model.
LARGE = 8192

# The `location` of a tensor whose data is in the model's own file (no path contains a NUL).
EMBEDDED = "\0embedded"

_LENGTH_DELIMITED, _BEGIN_GROUP, _END_GROUP = 2, 3, 4
_FIXED = {1: 8, 5: 4}


class WireError(ValueError):
    """The bytes are not a complete protocol buffer."""


class NestedError(WireError):
    """Messages are nested too deeply."""


# The greatest depth of messages that parsers of protocol buffers allow.
_DEEPEST = 100


class _Message(Enum):
    MODEL = 0
    GRAPH = 1
    NODE = 2
    ATTRIBUTE = 3
    FUNCTION = 4
    TENSOR = 5


# Which fields of which messages may hold tensors, by the fields' numbers in onnx.proto.
_CHILDREN: dict[_Message, dict[int, _Message]] = {
    _Message.MODEL: {7: _Message.GRAPH, 25: _Message.FUNCTION},
    _Message.GRAPH: {1: _Message.NODE, 5: _Message.TENSOR},
    _Message.NODE: {5: _Message.ATTRIBUTE},
    _Message.ATTRIBUTE: {5: _Message.TENSOR, 6: _Message.GRAPH, 10: _Message.TENSOR, 11: _Message.GRAPH},
    _Message.FUNCTION: {7: _Message.NODE},
}
# The field of an attribute that holds a tensor. If it occurs twice, protobuf merges both into one tensor.
_TENSOR_OF_ATTRIBUTE = 5
# Fields of TensorProto.
_DATA_TYPE, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 9, 13, 14
# The fields whose packed elements are the tensor's little-endian bytes, and the size of an element in bytes, by data
# type: float_data for FLOAT and COMPLEX64, double_data for DOUBLE and COMPLEX128. Strings are never in raw_data.
_PACKED = {1: (4, 4), 14: (4, 4), 11: (10, 8), 15: (10, 8)}
_STRING = 8
_DEFAULT, _EXTERNAL = 0, 1


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    start: int  # offset of the tag
    payload: int  # offset of the payload; -1 if the field is not length-delimited
    end: int


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise WireError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data: memoryview, at: int, end: int) -> Iterator[_Field]:
    """The fields of a message in their order. A group counts as one field (ONNX has no groups)."""
    groups: list[int] = []  # the numbers of the groups around a field
    start = at
    while at < end:
        if not groups:
            start = at
        tag, at = _varint(data, at, end)
        number, kind, payload = tag >> 3, tag & 7, -1
        if kind == _LENGTH_DELIMITED:
            length, payload = _varint(data, at, end)
            at = payload + length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in _FIXED:
            at += _FIXED[kind]
        elif kind == _BEGIN_GROUP and len(groups) < _DEEPEST:
            groups.append(number)
        elif kind == _END_GROUP and groups and groups.pop() == number:
            pass
        else:
            raise WireError(f"byte {start} does not start a field")
        if at > end or number == 0:
            raise WireError(f"the field at byte {start} is cut off")
        if not groups:
            yield _Field(number, start, payload, at)
    if groups:
        raise WireError(f"the field at byte {start} is cut off")


def varint(value: int) -> bytes:
    """The encoding of a non-negative number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def header(field: int, length: int) -> bytes:
    """Tag and length of a length-delimited field."""
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(length)


def _entry(key: str, value: str) -> bytes:
    k, v = key.encode(), value.encode()
    body = header(1, len(k)) + k + header(2, len(v)) + v
    return header(_EXTERNAL_DATA, len(body)) + body


def _number(data: memoryview, field: _Field) -> int | None:
    """The value of a field as an int32; None if the field has another wire type."""
    tag, at = _varint(data, field.start, field.end)
    return None if tag & 7 else _varint(data, at, field.end)[0] & 0xFFFFFFFF


def _payload(data: memoryview, fields: Sequence[_Field]) -> _Field | None:
    """The one field whose payload is the tensor's data as bytes; None if there is none, or if the data is external.

    The rules are protobuf's: the last occurrence of a number counts, and of an enumeration the last known value; packed
    elements of several fields are joined. If there is raw data, other data is ignored.
    """
    location = dtype = _DEFAULT
    for field in fields:
        if field.number == _DATA_TYPE:
            value = _number(data, field)
            dtype = dtype if value is None else value
        elif field.number == _DATA_LOCATION and (value := _number(data, field)) in (_DEFAULT, _EXTERNAL):
            location = value
    if location == _EXTERNAL or dtype == _STRING:
        return None
    raw = [field for field in fields if field.number == _RAW_DATA and field.payload >= 0]
    if raw:
        return raw[-1]
    number, size = _PACKED.get(dtype, (0, 1))
    packed = [field for field in fields if field.number == number]
    if len(packed) != 1 or packed[0].payload < 0 or (packed[0].end - packed[0].payload) % size:
        return None
    return packed[0]


def _strip_tensor(data: memoryview, at: int, end: int, parts: list[bytes]) -> None:
    fields = list(_fields(data, at, end))
    payload = _payload(data, fields)
    if payload is None or payload.end - payload.payload < LARGE:
        parts.append(bytes(data[at:end]))
        return
    replaced = (payload.number, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION)
    parts.extend(bytes(data[field.start : field.end]) for field in fields if field.number not in replaced)
    for key, value in (
        ("location", EMBEDDED),
        ("offset", str(payload.payload)),
        ("length", str(payload.end - payload.payload)),
    ):
        parts.append(_entry(key, value))
    parts.append(varint(_DATA_LOCATION << 3) + varint(_EXTERNAL))


def _strip(data: memoryview, at: int, end: int, kind: _Message, parts: list[bytes], depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise NestedError("too many bodies in bodies")
    if kind is _Message.TENSOR:
        _strip_tensor(data, at, end, parts)
        return
    children = dict(_CHILDREN[kind])
    if kind is _Message.ATTRIBUTE:
        tensors = [f for f in _fields(data, at, end) if f.number == _TENSOR_OF_ATTRIBUTE]
        if len(tensors) > 1:  # protobuf merges them into one tensor
            del children[_TENSOR_OF_ATTRIBUTE]
    pending = at  # the start of what has not been copied yet
    for field in _fields(data, at, end):
        child = children.get(field.number)
        if child is None or field.payload < 0 or field.end - field.payload < LARGE:
            continue
        if field.start > pending:
            parts.append(bytes(data[pending : field.start]))
        pending = field.end
        inner: list[bytes] = []
        _strip(data, field.payload, field.end, child, inner, depth + 1)
        parts.append(header(field.number, sum(map(len, inner))))
        parts.extend(inner)
    if end > pending:
        parts.append(bytes(data[pending:end]))


def strip_model(data: memoryview) -> bytes:
    """The serialised ModelProto without its large tensors.

    The data of large tensors is marked as external, at the location EMBEDDED, with offset and length in bytes of
    `data`. Raises WireError if the bytes are truncated or not a protocol buffer.
    """
    parts: list[bytes] = []
    _strip(data, 0, len(data), _Message.MODEL, parts)
    return b"".join(parts)


_GRAPH_OF_MODEL, _INITIALIZER_OF_GRAPH = 7, 5


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor to be written: the serialised TensorProto without its data, and the data."""

    proto: bytes
    data: memoryview

    @property
    def length(self) -> int:
        return len(self.proto) + len(header(_RAW_DATA, self.data.nbytes)) + self.data.nbytes


def model_length(model: bytes, graph: bytes, tensors: list[StreamedTensor]) -> int:
    """The number of bytes that `write_model` will write."""
    inner = len(graph) + sum(len(header(_INITIALIZER_OF_GRAPH, t.length)) + t.length for t in tensors)
    return len(model) + len(header(_GRAPH_OF_MODEL, inner)) + inner


def write_model(file: BinaryIO, model: bytes, graph: bytes, tensors: list[StreamedTensor]) -> None:
    """Write a ModelProto from its parts: the model without its graph, the graph without `tensors`, and the tensors."""
    inner = len(graph) + sum(len(header(_INITIALIZER_OF_GRAPH, t.length)) + t.length for t in tensors)
    file.write(model)
    file.write(header(_GRAPH_OF_MODEL, inner))
    file.write(graph)
    for tensor in tensors:
        file.write(header(_INITIALIZER_OF_GRAPH, tensor.length))
        file.write(tensor.proto)
        file.write(header(_RAW_DATA, tensor.data.nbytes))
        file.write(tensor.data)
