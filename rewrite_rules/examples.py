"""Builds the graphs of `examples` and `near_misses`, which may have constants inside a node's inputs."""

from __future__ import annotations

import re

_SIGNATURE = re.compile(
    r"(?:agraph )?(\(.*?\) => \([^)]*\))\s*(?:<((?:[^<>{}]|\{[^}]*\})*)>)?\s*\{(.*)\}\s*", re.S
)
_INPUTS = re.compile(r"\(([^()]*)\)")
# A number, or a list of numbers in brackets.
_CONSTANT = re.compile(r"(?<![\w.])(?:\[([^\]]*)\]|(-?\d[\d.e]*))")


def graphs(*texts: str) -> tuple[str, ...]:
    """Graphs in ONNX's text form from shorter ones: `(float[6,2] x) => (float[2,2] y) { y = Slice(x, [1], [3]) }`.

    Numbers, and lists of numbers, among a node's inputs become constants: of int64, or of float if one of them has a
    decimal point. Raises ValueError for a text that is no graph.
    """
    return tuple(_graph(text) for text in texts)


def _graph(text: str) -> str:
    match = _SIGNATURE.fullmatch(text)
    if match is None:
        raise ValueError(f"this is no graph: {text}")
    signature, initialisers, body = match.groups()
    constants: dict[str, str] = {}  # the name of each constant, by its declaration

    def named(constant: re.Match[str]) -> str:
        listed, number = constant.groups()
        values = [v for v in (listed or "").split(",") if v.strip()] if number is None else [number]
        kind = "float" if any("." in v for v in values) else "int64"
        shape = f"[{len(values)}]" if number is None else ""
        return constants.setdefault(f"{kind}{shape} @ = {{{','.join(values)}}}", f"k{len(constants)}")

    body = _INPUTS.sub(lambda inputs: f"({_CONSTANT.sub(named, inputs[1])})", body)
    declared = [d.replace("@", name) for d, name in constants.items()] + (
        [initialisers] if initialisers else []
    )
    return (
        f"agraph {signature} <{', '.join(declared)}> {{{body}}}"
        if declared
        else f"agraph {signature} {{{body}}}"
    )
