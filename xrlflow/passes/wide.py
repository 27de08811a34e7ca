"""Converts a module to float64: floats of 16 and 32 bits become float64, complex64 becomes complex128.

The converted module shows what the module computes in real numbers, nearly without rounding. So two modules that
compute the same agree in float64 even where float32 loses all digits of a result: a gradient that is 0 up to rounding,
divided by its own root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.passes import hlo
from xrlflow.passes.compiler import CompilerError

# Numbers of `PrimitiveType`.
_F16, _F32, _F64, _C64, _TUPLE, _BF16, _C128 = 10, 11, 12, 15, 13, 16, 18
_WIDER = {_F16: _F64, _F32: _F64, _BF16: _F64, _C64: _C128}
_EXACT = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, _F64, _C128, _TUPLE, 17})  # booleans, integers, tokens
# Instructions whose result depends on the width of the type, or on something outside the module.
_REFUSED = frozenset({"infeed", "outfeed", "recv", "rng", "send", "stochastic-convert"})
# For each type, the distance from 1 to the next larger number.
_UNITS = {_F16: 2.0**-10, _F32: 2.0**-23, _C64: 2.0**-23, _BF16: 2.0**-7}


def widened(data: bytes, nudge: int = 0) -> bytes:
    """A serialized HloModuleProto in float64. `nudge`: the seed by which constants (except powers of two) are changed
    by one unit of their own type in the last place, up or down; 0: no change.

    Raises CompilerError if the module has instructions that compute something else in float64.
    """
    module = hlo.parse(data, full=True)
    generator = np.random.default_rng(nudge) if nudge else None
    free = 1 + max(i.id for c in module.computations for i in c.instructions)
    for computation in module.computations:
        _program(computation.program_shape)
        shapes = {}
        for i in computation.instructions:
            shapes[i.id] = type(i.shape)()
            shapes[i.id].CopyFrom(i.shape)
        floats = {number for number, shape in shapes.items() if _has_floats(shape)}
        one = _Computation(shapes, floats, free, generator)
        after = [made for i in computation.instructions for made in one.widened(i)]
        free = one.free
        del computation.instructions[:]
        computation.instructions.extend(after)
    _program(module.host_program_shape)
    wide: bytes = module.SerializeToString(deterministic=True)
    return wide


def _program(program: Any) -> None:
    for shape in (*program.parameters, program.result):
        _shape(shape)


def _shape(shape: Any) -> None:
    """Raise CompilerError for floats of 8 bits and less: a module with such floats relies on their rounding."""
    if shape.element_type in _WIDER:
        shape.element_type = _WIDER[shape.element_type]
    elif shape.element_type not in _EXACT:
        raise CompilerError(f"element type {shape.element_type} has no counterpart in float64")
    for part in shape.tuple_shapes:
        _shape(part)


def _has_floats(shape: Any) -> bool:
    return shape.element_type in _WIDER or any(_has_floats(part) for part in shape.tuple_shapes)


@dataclass(slots=True)
class _Computation:
    """A computation that is converted."""

    shapes: dict[int, Any]  # shapes of the instructions before the conversion, by id
    floats: set[int]  # ids of the instructions whose floats become wider
    free: int  # ids from here on are unused
    generator: np.random.Generator | None

    def widened(self, instruction: Any) -> list[Any]:
        """The instructions that replace one: it in float64, with conversions around it if it accesses the bits of a
        float.
        """
        if instruction.opcode in _REFUSED:
            raise CompilerError(f"{instruction.opcode} {instruction.name} is something else in float64")
        if instruction.opcode == "custom-call" and self.floats & {instruction.id, *instruction.operand_ids}:
            raise CompilerError(f"custom-call {instruction.name} may be something else in float64")
        if instruction.opcode == "bitcast-convert":
            return self._bits(instruction)
        if instruction.opcode == "constant":
            _literal(instruction.literal, self.generator)
        if instruction.opcode in ("dot", "convolution"):
            instruction.precision_config.algorithm = 0
        _shape(instruction.shape)
        return [instruction]

    def _bits(self, instruction: Any) -> list[Any]:
        """An instruction that works on the bits of the narrow type: its operand is narrowed before it, or its result
        is widened after it.
        """
        instructions = [instruction]
        if instruction.operand_ids[0] in self.floats:
            narrow = self._conversion(instruction, self.shapes[instruction.operand_ids[0]])
            narrow.operand_ids.append(instruction.operand_ids[0])
            instruction.operand_ids[0] = narrow.id
            instructions.insert(0, narrow)
        if instruction.id in self.floats:
            wide = self._conversion(instruction, instruction.shape)
            _shape(wide.shape)
            # The two exchange their ids, so that readers of the instruction read the widened result.
            wide.id, instruction.id = instruction.id, wide.id
            wide.operand_ids.append(instruction.id)
            instructions.append(wide)
        return instructions

    def _conversion(self, instruction: Any, shape: Any) -> Any:
        """A new conversion to a shape. `instruction`: any instruction, for its message class."""
        conversion = type(instruction)(name=f"xrlflow.convert.{self.free}", opcode="convert", id=self.free)
        conversion.shape.CopyFrom(shape)
        self.free += 1
        return conversion


def _literal(literal: Any, generator: np.random.Generator | None) -> None:
    """Convert the numbers of a constant to float64, changed by one unit if there is a generator."""
    kind = literal.shape.element_type

    def moved(numbers: Any) -> Any:
        values = np.asarray(numbers, np.float64)
        if generator is None:
            return values
        signs = generator.choice((-1.0, 1.0), values.shape)
        # Powers of two are not changed: multiplication by them does not round.
        return np.where(np.frexp(np.abs(values))[0] == 0.5, values, values * (1 + _UNITS[kind] * signs))

    match kind:
        case 11:  # float32
            literal.f64s.extend(moved(literal.f32s))
            literal.ClearField("f32s")
        case 10:  # float16
            literal.f64s.extend(moved(np.frombuffer(literal.f16s, np.float16)))
            literal.ClearField("f16s")
        case 16:  # bfloat16
            literal.f64s.extend(moved(np.frombuffer(literal.bf16s, ml_dtypes.bfloat16)))
            literal.ClearField("bf16s")
        case 15:  # complex64
            literal.c128s.extend(moved(literal.c64s))
            literal.ClearField("c64s")
    for part in literal.tuple_literals:
        _literal(part, generator)
    _shape(literal.shape)
