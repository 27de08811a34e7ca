"""Concatenations without copies: kernels write their results directly into the concatenated tensor.

A tensor that becomes a slice of a concatenated one is never allocated: the kernels that write or read it get the
concatenated tensor, and find their elements in it. Only parts that no kernel computes (inputs, constants, a part that
occurs twice) are copied. DenseNet's features, for example, all live in the tensor that the last layer of a block reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.fusion.layouts import ELEMENTWISE
from xrlflow.backends.tvm.kernels.attention import SCHEDULED
from xrlflow.backends.tvm.schedules.dispatch import schedule
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import operator, sizes, with_calls
from xrlflow.backends.tvm.toolchain.target import Machine

_AXIS = "xrlflow.concat"
"""The attribute of a function that concatenates its other parameters into its last one. The value is the axis."""
_OPAQUE = 8  # relax's OpPatternKind: never fused
# The least number of elements of a concatenated tensor. Smaller tensors are concatenated in a kernel that is fused with
# the operators before and after, since several calls take longer.
_LEAST = 4096
# A part that one of these operators computes is copied anyway. It is copied together with other such parts.
_MOVES = frozenset(
    f"relax.{name}"
    for name in ("strided_slice", "dynamic_strided_slice", "split", "permute_dims", "reshape", "expand_dims")
    + ("squeeze", "broadcast_to", "take", "tile", "repeat", "flip", "gather_elements", "gather_nd", "nn.pad")
)


def separate(module: Any) -> Any:
    """The module in which concatenations of "main" have a kernel of their own, if at least half of their elements are
    computed, and not only moved. Without a kernel of its own, a concatenation would be fused with its reader, which
    would search all parts for each element."""

    def replace(call: Any, builder: Any) -> Any | None:
        from tvm import relax, topi

        if operator(call) != "relax.concat" or call.attrs.axis is None:
            return None
        whole, operands = sizes(call), call.args[0]
        operands = builder.lookup_binding(operands) if isinstance(operands, relax.Var) else operands
        if whole is None or not isinstance(operands, relax.Tuple) or math.prod(whole) < _LEAST:
            return None
        parts = list(operands.fields)
        computed = sum(math.prod(sizes(part) or ()) for part in parts if _is_computed(part, builder))
        if 2 * computed < math.prod(whole):
            return None
        axis = int(call.attrs.axis) % len(whole)
        return builder.call_te(
            topi.concatenate, parts, axis,
            primfunc_name_hint="concatenate", primfunc_attrs={"op_pattern": _OPAQUE, _AXIS: axis},
        )  # fmt: skip

    return with_calls(module, replace)


def _is_computed(part: Any, builder: Any) -> bool:
    """Whether the computation of a part contains other operators than element-wise ones and those that move
    elements."""
    from tvm import relax

    bound = builder.lookup_binding(part) if isinstance(part, relax.Var) else None
    if not isinstance(bound, relax.Call) or operator(bound) in _MOVES:
        return False
    return operator(bound) not in ELEMENTWISE or any(_is_computed(x, builder) for x in bound.args)


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a concatenated tensor. `shape`: the shape of the concatenated tensor. The slice begins at index
    `offset` along `axis`."""

    shape: tuple[int, ...]
    axis: int
    offset: int


def in_place(module: Any, machine: Machine) -> Any:
    """The module without concatenations. "main" must be a list of allocations and calls, as Relax's pass CallTIRRewrite
    returns it, and the kernels must be scheduled."""
    from tvm import relax

    if not any(_AXIS in (function.attrs or {}) for function in module.functions.values()):
        return module
    main = module["main"]
    steps = _Steps(module, [b for block in main.body.blocks for b in block.bindings], main.body.body)
    for copy in steps.copy_parts(machine):
        steps.remove(copy)
    body = relax.SeqExpr([relax.BindingBlock(steps.bindings)], main.body.body)
    done = steps.builder.get()
    changed = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    done.update_func(done.get_global_var("main"), changed)
    return done


@dataclass(frozen=True, slots=True)
class _Copy:
    """A call that copies its first tensor to a slice of its second."""

    binding: Any
    part_slice: Slice


class _Steps:
    """The bindings of a function that allocates tensors and calls kernels."""

    def __init__(self, module: Any, bindings: Sequence[Any], result: Any) -> None:
        from tvm import relax

        self.builder = relax.BlockBuilder(module)
        self.bindings = list(bindings)
        self._result = result
        self._kernels_on_slices: dict[
            Any, Any
        ] = {}  # the names of kernels on slices (None: impossible), by kernel, parameters and slice

    def copy_parts(self, machine: Machine) -> list[_Copy]:
        """Replace each concatenation by copies of its parts, and return these copies."""
        copies: list[_Copy] = []
        bindings: list[Any] = []
        for binding in self.bindings:
            function = self._kernel(binding)
            if function is None or _AXIS not in (function.attrs or {}):
                bindings.append(binding)
                continue
            *parts, whole = binding.value.args
            shape, axis, offset = sizes(whole), int(function.attrs[_AXIS]), 0
            assert shape is not None
            for part in parts:
                size = sizes(part)
                assert size is not None
                part_slice = Slice(shape, axis, offset)
                offset += size[axis]
                copies.append(_Copy(self._copy(part, size, whole, part_slice, machine), part_slice))
                bindings.append(copies[-1].binding)
        self.bindings = bindings
        return copies

    def remove(self, copy: _Copy) -> None:
        """Make the copied tensor a slice of the concatenated one for all kernels that use it, and remove the copy.

        The copy stays if that is not possible, or if the tensor has become a slice of another tensor already.
        """
        from tvm import relax

        binding = next(b for b in self.bindings if b.var.same_as(copy.binding.var))
        part, whole = binding.value.args
        tensors = self._tensors()
        tensor = tensors.get(part) if isinstance(part, relax.Var) else None
        if tensor is None or not binding.value.op.same_as(copy.binding.value.op):
            return
        if tensor in map(tensors.get, _variables(self._result)):
            return
        changed: dict[int, Any] = {}
        for at, other in enumerate(self.bindings):
            operands = list(_variables(other.value))
            uses = tuple(i for i, used in enumerate(operands) if tensors.get(used) == tensor)
            if not uses or tensors.get(other.var) == tensor or other.var.same_as(binding.var):
                continue
            if self._kernel(other) is None:
                return  # it is reshaped or returned
            name = self._sliced(other.value.op, uses, copy.part_slice)
            if name is None:
                return
            changed[at] = self._call(name, [whole if i in uses else x for i, x in enumerate(operands)])
        self._change(changed, tensors, tensor, whole)
        self.bindings = [b for b in self.bindings if not b.var.same_as(binding.var)]

    def _kernel(self, binding: Any) -> Any | None:
        """The function that a binding calls, if it is a kernel."""
        from tvm import relax, tirx
        from tvm.ir import GlobalVar

        value = binding.value
        if not isinstance(value, relax.Call) or not isinstance(value.op, GlobalVar):
            return None
        function = self.builder.get()[value.op]
        return function if isinstance(function, tirx.PrimFunc) else None

    def _tensors(self) -> dict[Any, int]:
        """For each variable that names a tensor allocated here: the number of that tensor, which is the index of its
        allocation."""
        from tvm import relax

        tensors: dict[Any, int] = {}
        for number, binding in enumerate(self.bindings):
            if operator(binding.value) == "relax.builtin.alloc_tensor":
                tensors[binding.var] = number
            elif isinstance(binding.value, relax.Var) and binding.value in tensors:
                tensors[binding.var] = tensors[binding.value]
        return tensors

    def _change(
        self, changed: Mapping[int, Any], tensors: Mapping[Any, int], tensor: int, whole: Any
    ) -> None:
        """Replace calls (`changed`, by index of the binding), and remove a tensor that has become a slice of `whole`.
        The allocation of `whole` moves to the earlier of both allocations."""
        from tvm import relax

        whole_tensor = tensors[whole]
        first, bindings = min(tensor, whole_tensor), []
        for at, binding in enumerate(self.bindings):
            if at == first:
                bindings.append(self.bindings[whole_tensor])
            if at != whole_tensor and tensors.get(binding.var) != tensor:
                bindings.append(relax.VarBinding(binding.var, changed.get(at, binding.value)))
        self.bindings = bindings

    def _sliced(self, name: Any, positions: tuple[int, ...], part_slice: Slice) -> Any | None:
        key = (str(name.name_hint), positions, part_slice)
        if key not in self._kernels_on_slices:
            function = sliced(self.builder.get()[name], positions, part_slice)
            added = None if function is None else self.builder.add_func(function, f"{key[0]}_slice")
            self._kernels_on_slices[key] = added
        return self._kernels_on_slices[key]

    def _call(self, name: Any, arguments: Sequence[Any]) -> Any:
        from tvm import relax

        return self.builder.normalize(relax.Call(name, list(arguments)))

    def _copy(self, part: Any, size: Sequence[int], whole: Any, part_slice: Slice, machine: Machine) -> Any:
        """A call of a kernel that copies a part to its slice of the concatenated tensor."""
        from tvm import relax, te

        source = te.placeholder(list(size), str(part.ty.dtype), name="part")
        same = te.compute(source.shape, lambda *i: source[i], name="copy")
        function = te.create_prim_func([source, same]).with_attr("tirx.noalias", True)
        scheduled = schedule(tvm().IRModule({"main": function}), machine).mod["main"]
        function = sliced(scheduled, (1,), part_slice)
        assert function is not None
        function = function.without_attr("global_symbol").with_attr(SCHEDULED, True)
        call = self._call(self.builder.add_func(function, "copy_slice"), [part, whole])
        return relax.VarBinding(relax.Var("copied", call.ty), call)


def _variables(value: Any) -> Iterator[Any]:
    """The operands of a call or the fields of a tuple; otherwise the value itself."""
    from tvm import relax

    if isinstance(value, relax.Call):
        yield from value.args
    elif isinstance(value, relax.Tuple):
        yield from value.fields
    elif isinstance(value, relax.TupleGetItem):
        yield value.tuple_value
    else:
        yield value


def sliced(function: Any, positions: Sequence[int], part_slice: Slice) -> Any | None:
    """A copy of the kernel `function` whose parameters at these positions are concatenated tensors, of which it uses
    the slice `part_slice`. None for a kernel that takes the address of such a parameter."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad, TensorRegion
    from tvm.tirx.analysis import undefined_vars
    from tvm_ffi import structural_map

    old = [function.params[i] for i in positions]
    new = [
        tirx.decl_buffer(list(part_slice.shape), str(b.dtype), b.name, data_alignment=b.data_alignment)
        for b in old
    ]
    parameters = list(function.params)
    for at, buffer in zip(positions, new):
        parameters[at] = buffer

    def whole(buffer: Any) -> Any | None:
        return next((n for o, n in zip(old, new) if o.same_as(buffer)), None)

    def moved(index: Any) -> Any:
        return index + tirx.const(part_slice.offset, index.ty.dtype) if part_slice.offset else index

    def at_slice(indices: Sequence[Any]) -> list[Any]:
        return [moved(index) if axis == part_slice.axis else index for axis, index in enumerate(indices)]

    def load(value: Any) -> Any:
        buffer = whole(value.source)
        return value if buffer is None else tirx.BufferLoad(buffer, at_slice(value.indices))

    def store(value: Any) -> Any:
        buffer = whole(value.buffer)
        return value if buffer is None else tirx.BufferStore(buffer, value.value, at_slice(value.indices))

    def region(value: Any) -> Any:
        buffer = whole(value.source)
        if buffer is None:
            return value
        ranges = list(value.region)
        along = ranges[part_slice.axis]
        ranges[part_slice.axis] = tvm().ir.Range.from_min_extent(moved(along.min), along.extent)
        return tirx.BufferRegion(buffer, ranges)

    body = structural_map(
        function.body, [(TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region)]
    )
    if any(whole(variable) is not None for variable in undefined_vars(body, [])):
        return None
    return tirx.PrimFunc(parameters, body, function.ret_type, function.attrs)
