"""Regions that differ in their weights alone, such as the layers of a network, are compiled once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, TypeProto

from xrlflow.backends.protocol import Array
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithms
from xrlflow.backends.tvm.library.code_generation import CompiledRegion, compile_part
from xrlflow.backends.tvm.lowering.plan import memory_of
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import SMALL, Made, following, is_weight
from xrlflow.onnxio.regions import Region, extracted, with_types

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


@dataclass(frozen=True, slots=True)
class _Known:
    """A compiled region, and the numbers of its weights by their names. Equal numbers of two regions of one form stand
    for the same weight."""

    region: CompiledRegion
    numbers: Mapping[str, int]


@dataclass(slots=True)
class Forms:
    """Compiles regions of one model for one processor, those of a form once. The form of a region is all that it is
    without names of values and without the elements of weights (`toolchain.weights.is_weight`).

    `compiled`: how many regions were compiled, not counting those that were made of others.
    """

    model: ModelProto
    machine: Machine
    compiled: int = field(default=0, init=False)
    _known: dict[Hashable, _Known] = field(default_factory=dict, init=False)
    _tensors: dict[str, TensorProto] = field(init=False)
    _large: dict[str, TensorProto] = field(init=False)  # those whose elements are no part of a form
    _region: Region | None = field(default=None, init=False)  # compiled last, and as a model of its own
    _part: ModelProto = field(init=False)
    _constants: dict[Made, Any] = field(default_factory=dict, init=False)  # of TVM
    _shared: dict[Made, Array] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self._large = {name: t for name, t in self._tensors.items() if _is_weight(t)}

    def compile(
        self,
        region: Region,
        types: Mapping[str, TypeProto],
        *,
        weights_as_inputs: bool = False,
        algorithms: Algorithms = DEFAULT,
    ) -> CompiledRegion:
        """See `compile_part`. `types`: the types, with fixed sizes, of the values that cross the region's border.
        Constants are shared with the region that was compiled before, if it is the same for other sizes."""
        if region is not self._region:
            self._region, self._part = region, extracted(self.model, region, types, without=self._large)
            self._shared, self._constants = {}, {}
        else:
            with_types(self._part, types)
        nodes = _in_order(self.model, region)
        numbers = _numbers(nodes, region)
        form = self._form(nodes, region, types, numbers)
        key = None if form is None else (form, weights_as_inputs, algorithms.packed_for)
        if key in self._known:
            return self._again(self._known[key], region, numbers)
        self.compiled += 1
        with following(self._constants) as followed:
            compiled = compile_part(
                self._part,
                region,
                self.machine,
                self._large,
                weights_as_inputs=weights_as_inputs,
                algorithms=algorithms,
            )
        plan = compiled.plan
        # Everything that is made of weights is known or was looked at. A large constant of other origin would be a
        # surprise, unless it is one number, such as the bias of a normalisation without one.
        moved = all(
            made is not None or array.size <= SMALL or (array == array.flat[0]).all()
            for made, array in zip(plan.made, plan.constants)
        )
        if key is not None and moved and not followed.looked_at and not plan.checks:  # checks name nodes
            self._known[key] = _Known(compiled, numbers)
        return compiled

    def _again(self, known: _Known, region: Region, numbers: Mapping[str, int]) -> CompiledRegion:
        """A region of the same form as a known one."""
        names = {number: name for name, number in numbers.items()}
        plan = known.region.plan
        constants = []
        for array, before in zip(plan.constants, plan.made):
            if before is None:
                constants.append(array)
                continue
            made = replace(before, weight=names[known.numbers[before.weight]])
            if made not in self._shared:
                self._shared[made] = made.of(onnx.numpy_helper.to_array(self._tensors[made.weight]))
            constants.append(self._shared[made])
        ignored = tuple((name, self._tensors[name].data_type) for name in region.weights)
        return replace(
            known.region,
            plan=replace(plan, constants=tuple(constants)),
            inputs=region.inputs,
            outputs=region.outputs,
            weights=ignored if known.region.weights else (),
        )

    def _form(
        self,
        inside: Sequence[NodeProto],
        region: Region,
        types: Mapping[str, TypeProto],
        numbers: Mapping[str, int],
    ) -> Hashable | None:
        """The form of a region; None for a region that is compiled for itself."""
        if any(attribute.type in _GRAPHS for node in inside for attribute in node.attribute):
            return None
        borders = tuple(
            (numbers[name], types[name].SerializeToString(deterministic=True))
            for name in (*region.inputs, *region.outputs)
        )
        weights = tuple(sorted((numbers[name], *_weight(self._tensors[name])) for name in region.weights))
        return tuple(_node(node, numbers) for node in inside), borders, len(region.inputs), weights


def _in_order(model: ModelProto, region: Region) -> list[NodeProto]:
    """The nodes of a region, producers first, in an order that only its form decides: as its outputs need them."""
    makers = {name: i for i in region.nodes for name in model.graph.node[i].output if name}
    ordered: dict[int, NodeProto] = {}
    pending = [makers[name] for name in reversed(region.outputs) if name in makers]
    while pending:
        node = model.graph.node[pending[-1]]
        before = [makers[name] for name in node.input if name in makers and makers[name] not in ordered]
        if before:
            pending += reversed(before)
        else:
            ordered.setdefault(pending.pop(), node)
    return list(ordered.values())


def _numbers(nodes: Sequence[NodeProto], region: Region) -> dict[str, int]:
    """A number for each value of a region. `nodes`: see `_in_order`."""
    names = dict.fromkeys(region.inputs)
    for node in nodes:
        names.update(dict.fromkeys(name for name in (*node.input, *node.output) if name))
    return {
        name: number for number, name in enumerate(names | dict.fromkeys((*region.weights, *region.outputs)))
    }


def _node(node: NodeProto, numbers: Mapping[str, int]) -> Hashable:
    attributes = sorted(
        (attribute.name, attribute.SerializeToString(deterministic=True)) for attribute in node.attribute
    )
    values = [tuple(numbers[name] if name else -1 for name in names) for names in (node.input, node.output)]
    return node.domain, node.op_type, tuple(attributes), *values


def _weight(tensor: TensorProto) -> tuple[int, tuple[int, ...], bytes]:
    """A weight without its elements; another constant with a digest of them."""
    elements = b""
    if not _is_weight(tensor):
        elements = hashlib.blake2b(memory_of(onnx.numpy_helper.to_array(tensor))).digest()
    return tensor.data_type, tuple(tensor.dims), elements


def _is_weight(tensor: TensorProto) -> bool:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return is_weight(dtype, math.prod(tensor.dims))
