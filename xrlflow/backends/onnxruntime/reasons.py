"""Shortens ONNX Runtime's error messages, and adds what to do if a model is newer than the runtime."""

from __future__ import annotations

import re

from xrlflow.common.text import printable, shortened

_LONGEST, _END = 500, 200
# A location in ONNX Runtime's source (file and line), and the function at that line: its name alone, or its whole
# signature.
_LOCATION = re.compile(r"\S*\.(?:cc|h|cpp|hpp):\d+ +")
_SIGNATURE = re.compile(r"(?:[\w:~<>*&,\[\] ]|\(anonymous namespace\))*\b(?:operator ?\(\)|\w+)\(")
_NAME = re.compile(r"(?:\w+::)*~?\w+ +(?=[A-Z])")
_TEMPLATE = re.compile(r" *(?:const\b)? *(?:\[with [^\]]*\])? *")
_STATUS = re.compile(
    r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)' Status Message: *"
)
_PREFIXES = re.compile(
    r"(?:Load model from .*? failed: *|This is an invalid model\. +(?=\S)|Exception during initialization: *|Error: )"
)
_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPSET = re.compile(r"Opset (\d+) is under development.*support for domain (\S+) is till opset (\d+)")
_UNKNOWN = re.compile(
    r"(?:Fatal error: )?(?:(?P<domain>[\w.]*):(?P<op>\w+)\(-?\d*\) is not a registered function/op"
    r"|.*No Op registered for (?P<standard>\w+) with domain_version of (?P<opset>\d+))"
)
# The first version of ONNX Runtime that reads these versions of the IR and of the opset.
_RUNTIME = {("ir", 14): "1.32", ("opset", 27): "1.32", ("opset", 28): "1.32"}


def reason(error: object) -> str:
    """The message of an ONNX Runtime error on one line, without error codes, and without locations and functions in its
    source."""
    text = printable(error)
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    advice = _by_version(text) or _unknown_operator(_without_prefixes(text))
    if advice is None:
        advice = _without_location(_STATUS.sub(_of_node, _without_prefixes(text)))
    return shortened(advice.strip(), _LONGEST, _END)


def _of_node(match: re.Match[str]) -> str:
    op, name = match.groups()
    return f"{op} {name!r}: " if name else f"{op}: "


def _without_prefixes(text: str) -> str:
    while match := _PREFIXES.match(text):
        text = text[match.end() :]
    return text


def _without_location(text: str) -> str:
    """The text without the first location in ONNX Runtime's source, if something follows it."""
    location = _LOCATION.search(text)
    if location is None:
        return text
    remainder = text[location.end() :]
    if signature := _SIGNATURE.match(remainder):
        end = _closing(remainder, signature.end() - 1)
        following = _TEMPLATE.match(remainder, end)
        remainder = remainder[following.end() if following else end :]
    elif name := _NAME.match(remainder):
        remainder = remainder[name.end() :]
    return text[: location.start()] + _without_prefixes(remainder) if remainder.strip() else text


def _closing(text: str, at: int) -> int:
    """The index after the parenthesis that closes the one at index `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _by_version(text: str) -> str | None:
    """A message that says what to do if the error means that the model is newer than the runtime; None for other
    errors."""
    import onnxruntime

    ours = f"this ONNX Runtime ({onnxruntime.__version__})"
    if match := _IR.search(text):
        version, most = map(int, match.groups())
        runtime = _RUNTIME.get(("ir", version), "of a newer version")
        return (
            f"its IR version is {version}, and {ours} reads {most} at most: set the model's `ir_version` to {most}, "
            f"or install ONNX Runtime {runtime}"
        )
    if match := _OPSET.search(text):
        version, most = int(match[1]), int(match[3])
        domain = "" if match[2] == "ai.onnx" else f" of {match[2]}"
        runtime = _RUNTIME.get(("opset", version), "of a newer version")
        return (
            f"its opset{domain} is {version}, and {ours} reads {most} at most: export the model with an older opset, "
            f"or install ONNX Runtime {runtime}"
        )
    return None


def _unknown_operator(text: str) -> str | None:
    """What to do about an operator that the runtime does not know."""
    match = _UNKNOWN.match(text)
    if match is None:
        return None
    if match["op"] is None:
        return f"opset {match['opset']} has no operator {match['standard']}: export the model with an opset that has it"
    return (
        f"it has no operator {match['op']} of {match['domain']!r}: register the library of that operator in "
        "SessionOptions, and give them to xrlflow.optimize(..., options=Options(session_options=...))"
    )
