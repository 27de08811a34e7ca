"""The arguments that several commands share, and command-line flags from classes of options."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from xrlflow.cli.completion import completing
from xrlflow.cli.failures import fail
from xrlflow.common.sizes import Size, as_range, parse_size
from xrlflow.options import GROUPS, Flag, flags

Model = Annotated[Path, typer.Argument(help="The ONNX file; -: standard input.")]
ReportTo = Annotated[
    Path | None,
    typer.Option("--report", help="Write a report page (HTML, one file) here; times the operators for it."),
]


def _hush(quiet: bool) -> bool:
    if quiet:
        warnings.simplefilter("ignore")
    return quiet


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", callback=_hush, is_eager=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Load the library of kernels in the model's folder (NAME.so).")
]
Arguments = dict[str, Any]
"""The values of flags by field name."""


def taking(kind: type, *names: str, **texts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the flags of a class of options, in groups: the flags in `names`, or all. The
    command receives the values of the flags as its parameter `options`. `texts` replaces the help of options.
    """
    flags_by_name = {
        name: flag_and_default for name, flag_and_default in flags(kind).items() if not names or name in names
    }
    groups = {} if names else {name: group for group, inside in GROUPS.items() for name in inside}

    def parameter(name: str, flag: Flag, default: Any) -> inspect.Parameter:
        declared = () if flag.name is None else (flag.name,)
        info = typer.Option(
            *declared,
            help=texts.get(name, flag.help),
            min=flag.least,
            show_default=flag.shown,
            autocompletion=completing(flag.values) if flag.values else None,
            rich_help_panel=groups.get(name),
        )
        several = default == ()
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if several else default,
            annotation=Annotated[(flag.type | None) if several else flag.type, info],
        )

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [parameter(name, *flag_and_default) for name, flag_and_default in flags_by_name.items()]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters[:0] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "options"]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            arguments = {name: values.pop(name) for name in flags_by_name}
            command(
                options={
                    n: () if v is None and flags_by_name[n][1] == () else v for n, v in arguments.items()
                },
                **values,
            )

        del wrapper.__wrapped__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorated


def parse_shapes(options: list[str] | None) -> list[dict[str, tuple[Size, ...]]]:
    """The shapes by input name. If an input is repeated, its n-th shape is in the n-th mapping."""
    mappings: list[dict[str, tuple[Size, ...]]] = []
    for option in options or ():
        name, equals, dims = option.rpartition("=")
        shape: tuple[Size, ...] = ()
        try:
            shape = tuple(parse_size(d) for d in dims.split(",") if d.strip()) if equals else ()
        except ValueError:
            equals = ""
        if not equals or not name or any(as_range(size)[0] < 0 for size in shape):
            fail(f"--shape {option}: write it as NAME=1,3,224,224, or with a range as NAME=1,16..512")
        into = next((mapping for mapping in mappings if name not in mapping), None)
        if into is None:
            mappings.append(into := {})
        into[name] = shape
    return mappings


def with_shapes(options: Arguments, *, several: bool = False) -> Arguments:
    """The options with --shape parsed into shapes by input name. `several`: whether an input may have more than one
    shape.
    """
    shapes = parse_shapes(options["shapes"])
    first, further = shapes[0] if shapes else None, shapes[1:]
    if further and not several:
        fail(f"--shape: {next(iter(further[0]))} is given twice")
    return options | {"shapes": first} | ({"further_shapes": further} if several else {})
