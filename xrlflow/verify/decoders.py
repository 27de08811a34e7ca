"""Decoders with a cache, as their signatures show them: which output is the next step's input, and what a step is
given besides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.backends.onnxruntime.generate import Cache
from xrlflow.ir import FLOATS, DType
from xrlflow.onnxio import ImportedModel, ModelError
from xrlflow.ops.infer import type_of_proto
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.verify.dims import Role
from xrlflow.verify.inputs import InputPlan
from xrlflow.verify.runner import Array
from xrlflow.verify.signature import Port

_IDS = frozenset({DType.INT32, DType.INT64})
# What a name says besides which cache it is; names of caches, certain and likely; inputs that an encoder returned.
_FILLING = re.compile(
    r"(past|present)_key_values?"
    r"|(?<![a-z])(past|present|prev|previous|new|next|updated|in|out|input|output|cached?)(?![a-z])"
)
_SURE = re.compile(r"past|cache|state|memory|memories|mems|recurrent")
_LIKELY = re.compile(_SURE.pattern + r"|present|hidden|(?<![a-z])[hckv]\d*(?![a-z])")
_ENCODED = re.compile("encod|cross")
_EXPECTED = "expected are inputs such as past_key_values.0.key with outputs such as present.0.key"


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model with caches, and the rules by which its inputs are drawn."""

    name: str
    plan: InputPlan
    caches: tuple[Cache, ...]
    result: str  # the first output of floats that is no cache, or else the first cache
    moving: tuple[Port, ...]  # the inputs besides caches that differ from step to step
    sequence: int | str  # tokens of a run: their number, or the name of an open dimension
    growing: frozenset[int | str]  # the dimensions that are the length of a cache

    @staticmethod
    def of(imported: ImportedModel) -> Decoder:
        """Pair the caches of a model. Raises ModelError, with the names of inputs, if it has none, or if an input
        that seems to be a cache has no output, or several."""
        plan = InputPlan.of(imported)
        outputs = [Port(v.name, type_of_proto(v.type)) for v in imported.frame.graph.output]
        try:
            caches = _caches(plan, outputs)
        except ModelError as error:
            raise ModelError(f"{imported.name}: {error}") from error
        returned, given = {cache.output for cache in caches}, {cache.input for cache in caches}
        floats = [p.name for p in outputs if p.type.dtype in FLOATS]
        own = [p for p in plan.ports if p.name not in given and not _encoded(p)]
        tokens = _tokens(own)
        sequence = 1 if tokens is None else _dims(tokens)[1]
        spanning = [p for p in own if isinstance(sequence, str) and sequence in _dims(p)]
        return Decoder(
            name=imported.name,
            plan=plan,
            caches=caches,
            result=next((name for name in floats if name not in returned), floats[0]),
            moving=tuple(p for p in own if _is_place(p) or p.type.dtype in _IDS or p in (tokens, *spanning)),
            sequence=sequence,
            growing=_growing(plan, caches),
        )

    @property
    def step(self) -> int:
        """The number of tokens of a step."""
        return self.sequence if isinstance(self.sequence, int) else 1

    def batch(self, start: Mapping[str, Array]) -> int:
        """The number of sequences, by the first cache: its first dimension."""
        return int(start[self.caches[0].input].shape[0])

    def room(self) -> tuple[int, str] | None:
        """How many tokens fit, and the input that says so; None if any number fits."""
        found = []
        for port in self.moving:
            last = _dims(port)[-1] if _dims(port) else None
            interval = self.plan.demands[port.name].interval(
                lambda dim: dim if isinstance(dim, int) else None
            )
            if _is_mask(port) and isinstance(last, int):
                found.append((last, port.name))
            elif _is_position(port) and interval is not None:
                found.append((interval[1] + 1, port.name))
        return min(found, default=None)

    def start(self, past: int, seed: int) -> dict[str, Any]:
        """The caches with `past` tokens, and the inputs that stay as they are. States begin with zeros."""
        feeds = self._drawn([p for p in self.plan.ports if p not in self.moving], past, self.step, seed)
        states = {cache.input for cache in self.caches if cache.axis is None and not cache.once}
        return {name: np.zeros_like(array) if name in states else array for name, array in feeds.items()}

    def tokens(self, past: int, count: int, seed: int) -> dict[str, Any]:
        """The other inputs of a run with `count` tokens after `past` cached ones."""
        places = {p.name: self._place(p, past, count) for p in self.moving if _is_place(p)}
        return self._drawn([p for p in self.moving if p.name not in places], past, count, seed) | places

    def _sizes(self, past: int, count: int) -> dict[str, int]:
        dimensions = self.plan.dimensions
        usual = dimensions.default(self.plan.bound)
        sizes = {s.name: past + count if s.role == Role.TOTAL else usual[s.name] for s in dimensions.slots}
        sizes |= {str(name): past for name in self.growing} | {str(self.sequence): count}
        return dimensions.complete(sizes)

    def _drawn(self, ports: Sequence[Port], past: int, count: int, seed: int) -> dict[str, Any]:
        plan = replace(self.plan, ports=tuple(ports), defaults=())
        return dict(plan.case(self._sizes(past, count), seed, 0).feeds)

    def _place(self, port: Port, past: int, count: int) -> Array:
        """A mask (of rank 3 or more: causal; then of floats: 0 and the least float), positions, or what is cached."""
        name, dtype, dims = port.name.lower(), numpy_dtype(port.type.dtype), _dims(port)
        shape = list(self.plan.dimensions.shape(port, self._sizes(past, count)))
        rows = np.asarray(count - 1)
        if _is_mask(port):
            if isinstance(dims[-1], str):
                shape[-1] = past + count
            if len(dims) > 2:
                shape[-2] = dims[-2] if isinstance(dims[-2], int) else count
                rows = np.arange(shape[-2])
            seen = np.broadcast_to(np.arange(shape[-1]) <= past + rows[..., None], shape)
            if len(dims) > 2 and port.type.dtype in FLOATS:
                least = ml_dtypes.finfo(dtype).min  # type: ignore[no-untyped-call]
                return np.where(seen, 0, least).astype(dtype)
            return seen.astype(dtype)
        if _is_position(port) and shape:
            shape[-1] = dims[-1] if isinstance(dims[-1], int) else count
            return np.broadcast_to(past + np.arange(shape[-1]), shape).astype(dtype)
        number = past + count if "total" in name else past + count - 1 if "seqlen" in name else past
        return np.full(shape, number).astype(dtype)


def _dims(port: Port) -> tuple[int | str, ...]:
    """Numbers of dimensions; of open ones the names by which `Dimensions` knows them."""
    shape = port.type.shape or ()
    return tuple(dim if dim is not None else f"{port.name}.{axis}" for axis, dim in enumerate(shape))


def _growing(plan: InputPlan, caches: Sequence[Cache]) -> frozenset[int | str]:
    axes = {cache.input: cache.axis for cache in caches}
    return frozenset(_dims(p)[axis] for p in plan.ports if (axis := axes.get(p.name)) is not None)


def _tokens(ports: Sequence[Port]) -> Port | None:
    """The input with the tokens of a run: their numbers, or their embeddings."""
    free = [p for p in ports if not _is_place(p)]
    ids = [p for p in free if p.type.dtype in _IDS and len(_dims(p)) == 2]
    named = [p for p in ids if re.search("ids|token", p.name.lower())]
    embedded = [p for p in free if p.type.dtype in FLOATS and len(_dims(p)) == 3]
    return next(iter([*named, *ids, *embedded]), None)


def _encoded(port: Port) -> bool:
    return bool(_ENCODED.search(port.name.lower()))


def _is_mask(port: Port) -> bool:
    return "mask" in port.name.lower() and not _encoded(port) and len(_dims(port)) > 0


def _is_position(port: Port) -> bool:
    return "position" in port.name.lower() and port.type.dtype in _IDS


def _is_flag(port: Port) -> bool:
    """Whether an input says if there is a cache yet."""
    return port.type.dtype == DType.BOOL and "cache" in port.name.lower()


def _is_place(port: Port) -> bool:
    """Whether an input says where in the sequence a run is."""
    counts = port.type.dtype in _IDS and re.search("past|total|offset|seqlen", port.name.lower())
    return _is_mask(port) or _is_position(port) or bool(counts) or _is_flag(port)


# --- which output is whose cache ---


def _caches(plan: InputPlan, outputs: Sequence[Port]) -> tuple[Cache, ...]:
    inputs = [
        p
        for p in plan.ports
        if p.type.dtype in FLOATS and len(_dims(p)) >= 2 and not re.search("mask|embed|hidden_states", p.name)
    ]
    pairs = _pairs(inputs, outputs)
    branched = any(map(_is_flag, plan.ports))
    found = [_cache(plan, p, pairs[p.name], branched) for p in inputs if p.name in pairs]
    caches = tuple(cache for cache in found if cache is not None)
    grown = _growing(plan, caches) - {1}
    _refuse(
        p
        for p in inputs
        if p.name not in pairs and not _encoded(p) and (_SURE.search(p.name.lower()) or grown & {*_dims(p)})
    )
    if not caches:
        names = ", ".join(repr(p.name) for p in plan.ports)
        raise ModelError(f"has no cache that goes round: {_EXPECTED}; its inputs are {names or 'none'}")
    return caches


def _refuse(ports: Any) -> None:
    if names := ", ".join(repr(port.name) for port in ports):
        raise ModelError(
            f"no single output can be paired with {names}: each cache needs one of the same type and rank, by a name "
            f"like its own or in the same order; {_EXPECTED}"
        )


def _pairs(inputs: Sequence[Port], outputs: Sequence[Port]) -> dict[str, Port]:
    """The output of each input: one with the same name but for words like "past"; for the others, inputs of one type
    are paired in order with the outputs that fit them, if there are as many of both."""
    pairs: dict[str, Port] = {}
    stems = Counter(_stem(port.name) for port in inputs)
    for port in inputs:
        stem = _stem(port.name)
        alike = [o for o in outputs if stem and _stem(o.name) == stem and _changing(port, o) is not None]
        if len(alike) == stems[stem] == 1:
            pairs[port.name] = alike[0]
    rest = [p for p in inputs if p.name not in pairs and not _encoded(p)]
    for kind in dict.fromkeys(p.type for p in rest):
        opened = len(kind.shape or ()) >= 3 and any(
            not isinstance(dim, int) for dim in (kind.shape or ())[1:]
        )
        same = [p for p in rest if p.type == kind and (opened or _LIKELY.search(p.name.lower()))]
        free = [o for o in outputs if o not in pairs.values() and same and _changing(same[0], o) is not None]
        free = [o for o in free if _LIKELY.search(o.name.lower())] or free
        if len(same) == len(free):
            _refuse(p for p, o in zip(same, free) if {_half(p.name), _half(o.name)} == {"k", "v"})
            pairs |= {p.name: o for p, o in zip(same, free)}
    return pairs


def _cache(plan: InputPlan, port: Port, output: Port, branched: bool) -> Cache | None:
    """The cache of a pair; None for what stays as it is, and for what a layer takes and returns. The dimension that
    grows has a name that says so, or else is the only one that differs, batches apart."""
    if _encoded(port):
        return Cache(port.name, output.name, None, once=True) if branched else None
    roles = {slot.name: slot.role for slot in plan.dimensions.slots}
    dims, later = _dims(port), output.type.shape or ()
    axes = [axis for axis, dim in enumerate(dims) if roles.get(str(dim)) == Role.PAST]
    axes = axes or [a for a in _changing(port, output) or [] if roles.get(str(dims[a])) != Role.BATCH]
    axes = [a for a in axes if isinstance(dims[a], str) or isinstance(later[a], int)]
    if len(axes) > 1:
        _refuse([port])
    if axes and isinstance(dims[axes[0]], int):
        raise ModelError(
            f"input {port.name!r} has a fixed length of {dims[axes[0]]}, and output {output.name!r} is longer: a loop "
            "needs an open dimension there"
        )
    stays = all(isinstance(dim, int) or roles.get(str(dim)) == Role.BATCH for dim in dims)
    named = _LIKELY.search(port.name.lower()) or _LIKELY.search(output.name.lower())
    return Cache(port.name, output.name, axes[0] if axes else None) if axes or (stays and named) else None


def _half(name: str) -> str:
    """Whether a name says that a cache is one of keys ("k") or of values ("v")."""
    found = re.findall(r"(?<![a-z])(k|v)(?:eys?|als?|alues?|c)?(?![a-z])", name.lower())
    return found[-1] if found else ""


def _stem(name: str) -> tuple[str, ...]:
    """What two names of one cache have in common: "past_key_values.0.key" and "present.0.key" are 0 and key."""
    return tuple(sorted(re.findall(r"[a-z]+|\d+", _FILLING.sub(" ", name.lower()))))


def _changing(port: Port, output: Port) -> list[int] | None:
    """The axes in which an output differs from the input that it may be in the next step, or is not known; None if it
    cannot be that: another type or rank, a shorter dimension, or a number where the input's length is open."""
    shape, later = port.type.shape or (), output.type.shape
    if port.type.dtype != output.type.dtype or (later is not None and len(later) != len(shape)):
        return None
    pairs = list(enumerate(zip(shape, later or shape)))
    axes = [axis for axis, (before, after) in pairs if before != after or before is None]
    for axis, (before, after) in pairs:
        opened = not isinstance(before, int)
        if isinstance(after, int) and axis > 0 and (opened or (isinstance(before, int) and after < before)):
            return None
    fixed = [axis for axis, (a, b) in pairs if isinstance(a, int) and isinstance(b, int) and a != b]
    return axes if len(fixed) <= 1 else None
