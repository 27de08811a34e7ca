"""Operators: immutable nodes with immutable attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from xrlflow.ir.types import TensorType, Value

if TYPE_CHECKING:
    from xrlflow.ir.graph import Graph

_MASK = (1 << 60) - 1
_LEFT = 0x6C656674
_digests: dict[str, int] = {}


def digest(text: str) -> int:
    """A number derived from a text. It is the same in every process."""
    number = _digests.get(text)
    if number is None:
        raw = blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        number = _digests[text] = int.from_bytes(raw, "little") & _MASK
    return number


def mix(*parts: int) -> Value:
    """A value's number, derived from the numbers of its content. Tuples of integers hash the same in every process."""
    return Value((hash(parts) & _MASK) or 1)


@dataclass(frozen=True, slots=True)
class RawAttr:
    """An attribute that rules do not read (a tensor, a type, a sparse tensor), as a serialised proto."""

    proto: bytes

    def __repr__(self) -> str:
        return f"raw:{blake2b(self.proto, digest_size=8).hexdigest()}"


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A control-flow body, which is a graph of its own.

    `captured` are the last inputs of `graph`. They stand for values of the enclosing graph, which are the last inputs
    of the node that owns the body, in the same order.
    """

    graph: Graph
    captured: tuple[Value, ...]
    name: str = ""

    def __repr__(self) -> str:
        return f"body:{self.graph.fingerprint:x}:{self.captured}"


Attr = int | float | str | bytes | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | RawAttr | Body


class Attrs(Mapping[str, Attr]):
    """Immutable attributes, sorted by name. Attributes that equal the operator's default are left out."""

    __slots__ = ("_items", "digest")

    _items: dict[str, Attr]
    digest: int

    def __init__(self, items: Mapping[str, Attr] = {}) -> None:
        self._items = dict(sorted(items.items()))
        self.digest = digest(repr(self._items)) if self._items else 0

    def __getitem__(self, name: str) -> Attr:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self.digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attrs) and self.digest == other.digest

    def __repr__(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self._items.items())


NO_ATTRS = Attrs()


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator. Nodes are compared by identity; `key` compares their content.

    `op` is the operator's name, with its domain in front if it is not ONNX's own ("com.microsoft::Gelu"). `inputs` have
    ABSENT for missing optional inputs; the last `captured` ones are the values that bodies read from outside. Every
    output has a value, even an unused one. `on_runtime`: ONNX Runtime runs the node even where other nodes run in
    generated kernels.
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    types: tuple[TensorType, ...]
    attrs: Attrs = NO_ATTRS
    captured: int = 0
    on_runtime: bool = False
    # A number for operator, attributes and inputs, that is, for what the node computes.
    key: int = field(init=False)
    # The same with the outputs and `on_runtime`: the node's summand in the graph's fingerprint.
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        key = node_key(self.op, self.attrs, self.inputs)
        object.__setattr__(self, "key", key)
        named = (key, *self.outputs, _LEFT) if self.on_runtime else (key, *self.outputs)
        object.__setattr__(self, "fingerprint", mix(*named))

    @property
    def id(self) -> Value:
        """The first output. It names the node in its graph, and stays the same when inputs change."""
        return self.outputs[0]

    @property
    def const(self) -> bool:
        """Whether the node is evaluated when the model is written, so that it takes no time at run time."""
        return self.types[0].const

    @property
    def explicit_inputs(self) -> tuple[Value, ...]:
        return self.inputs[: len(self.inputs) - self.captured] if self.captured else self.inputs

    def with_inputs(self, inputs: tuple[Value, ...]) -> Node:
        return Node(self.op, inputs, self.outputs, self.types, self.attrs, self.captured, self.on_runtime)

    def with_outputs(self, outputs: tuple[Value, ...]) -> Node:
        return Node(self.op, self.inputs, outputs, self.types, self.attrs, self.captured, self.on_runtime)

    def with_runtime(self, on_runtime: bool) -> Node:
        """The same node, to run in ONNX Runtime (`on_runtime`) or in a generated kernel."""
        return Node(self.op, self.inputs, self.outputs, self.types, self.attrs, self.captured, on_runtime)


def node_key(op: str, attrs: Attrs, inputs: tuple[Value, ...]) -> Value:
    """A number for what a node computes."""
    return mix(digest(op), attrs.digest, *inputs)


def output_key(key: int, index: int, salt: int = 0) -> Value:
    """The value for output `index` of a node with content `key`. Different `salt` gives different values."""
    return mix(key, index, salt)
