"""Reports as tables on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xrlflow.backends.library_files import library_path
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice, multiplies_less
from xrlflow.common.text import printable, printable_words
from xrlflow.prover import Certificate
from xrlflow.report.reasons import PHASES
from xrlflow.report.report import Report
from xrlflow.verify import HEADERS, Verification


class _Console(Console):
    """Prints text without markup. Characters that cannot be printed are escaped, except line breaks."""

    def print(self, *objects: Any, **options: Any) -> None:
        plain = ("\n".join(map(printable_words, o.split("\n"))) if isinstance(o, str) else o for o in objects)
        super().print(*plain, **options)


class _Table(Table):
    """A table whose cells are plain text on one line."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in cells), **options)


_console = _Console(markup=False, emoji=False)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"


def ratio(value: SpeedUp | None) -> str:
    return "-" if value is None else str(value)


def _grid(*headers: str, title: str | None = None) -> _Table:
    table = _Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(headers))
    for index, header in enumerate(headers):
        # Names are not cut off, because a user could not copy them.
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def optimization(report: Report, output: str) -> None:
    """Print a report: what was changed, and the speed-up with its confidence interval."""
    operators = _grid("operator", "before", "after", title="Operators that changed")
    names = sorted(report.operators_before.keys() | report.operators_after.keys())
    for name in names:
        before, after = report.operators_before.get(name, 0), report.operators_after.get(name, 0)
        if before != after:
            operators.add_row(name, str(before), str(after))
    operators.add_row("all", str(report.nodes_before), str(report.nodes_after))
    _console.print(operators)
    if report.substitutions:
        table = _grid("substitution", "times", title="\nSubstitutions")
        for rule, count in sorted(report.substitutions.items(), key=lambda item: (-item[1], item[0])):
            table.add_row(rule, str(count))
        _console.print(table)
    if multiplies_less(report.algorithms):
        _console.print(_algorithms([each for each in report.algorithms if not each.plain]))
    summary = _grid("", "", title="\nResult")
    summary.show_header = False
    guided = f"guided by {report.cost_model}" if report.search != "replay" else "not searched for"
    summary.add_row("search", f"{report.search}, {report.expanded} graphs, {guided}")
    summary.add_row(
        "modelled cost", f"{report.cost_before * 1e3:.3f} -> {report.cost_after * 1e3:.3f} ms (not a latency)"
    )
    if report.latency_before is not None and report.latency_after is not None:
        summary.add_row(
            "measured latency",
            f"{ms(report.latency_before.median_ms)} -> {ms(report.latency_after.median_ms)}, {report.threads} threads",
        )
        summary.add_row("speed-up, 95% interval", ratio(report.speedup))
    for text, at in report.at_sizes.items():
        summary.add_row(f"with {text}", ratio(at))
    if report.decided is not None:
        summary.add_row("what decided before", ratio(report.decided))
    if report.control is not None:
        summary.add_row("original against itself", ratio(report.control))
    summary.add_row("verification", _verdict(report.verified, report.max_error, report.exactness))
    summary.add_row("time", f"{report.seconds:.1f} s: {_phase_times(report)}")
    _console.print(summary)
    for note in report.notes:
        _console.print(f"note: {note}")
    if report.returned_original:
        _console.print(f"\n{output}: the original, unchanged ({report.reason})")
    else:
        library = f" and {library_path(output).name}, its kernels" if report.kernel_nodes else ""
        _console.print(f"\n{output}{library}: written ({report.reason})")


def page(path: Path | None) -> None:
    """Print where the report page is, if one was requested."""
    if path is not None:
        _console.print(f"{path}: the report page, open it in a browser")


def _algorithms(choices: Sequence[AlgorithmChoice]) -> Table:
    """The layers whose algorithm is not the plain one, by kind of layer."""
    table = _grid(
        "layer", "times", "algorithm", "error", "share of all errors", title="\nAlgorithms of convolutions"
    )
    for layer, algorithm in dict.fromkeys((c.layer, c.algorithm) for c in choices):
        group = [c for c in choices if (c.layer, c.algorithm) == (layer, algorithm)]
        error = max(c.error for c in group)
        share = sum(c.share for c in group)
        table.add_row(layer, str(len(group)), algorithm, f"{error:.1f}x plain", f"{share:.0%}")
    return table


def _phase_times(report: Report) -> str:
    """The seconds of each phase, as text."""
    parts = [(name, report.phases[key]) for key, name in PHASES.items() if key in report.phases]
    other = report.seconds - sum(seconds for _, seconds in parts)
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in [*parts, ("other", max(other, 0.0))])


def _verdict(verified: bool | None, error: float | None, exactness: str = "") -> str:
    verdict = {True: "equal", False: "DIFFERENT", None: "not checked"}[verified]
    verdict = f"{verdict}, layers {exactness}" if exactness else verdict
    return verdict if error is None else f"{verdict}, largest deviation {error:.2e}"


def proven(certificate: Certificate, done: int, total: int) -> None:
    """Print one line for a rule whose proof has ended."""
    verdict = "proven" if certificate.proven else "NOT PROVEN"
    if certificate.proven and certificate.unexplained:
        verdict = f"{len(certificate.unexplained)} mutants survive, nobody knows why"
    _console.print(f"{done:4}/{total} {certificate.name}: {verdict}", highlight=False)


def certificates(proofs: Sequence[Certificate]) -> None:
    """Print the certificate of each rule, and why rules are not proven."""
    table = _grid(
        "rule", "proof", "cases", "trials", "bound", "runtime", "bits", "mutants", "rejected", "s", title=""
    )
    for c in proofs:
        table.add_row(
            c.name, c.proof if c.proven else "NOT PROVEN", str(c.admitted), str(c.trials),
            f"{c.bound:.0e}" if c.proof == "field" else "-", str(c.runtime_cases),
            "-" if c.bits is None else f"{c.bits:.1f}", str(c.mutants), str(c.mutants_rejected), f"{c.seconds:.1f}",
        )  # fmt: skip
    _console.print(table)
    mutants, rejected = sum(c.mutants for c in proofs), sum(c.mutants_rejected for c in proofs)
    good = sum(c.proven for c in proofs)
    share = 100 * rejected / mutants if mutants else 100.0
    _console.print(
        f"\n{good} of {len(proofs)} rules proven; {rejected} of {mutants} mutants rejected ({share:.1f}%)"
    )
    for kind in sorted({k for c in proofs for k in c.mutants_by_kind}):
        kinds = [c.mutants_by_kind[kind] for c in proofs if kind in c.mutants_by_kind]
        good, total = (sum(k[i] for k in kinds) for i in range(2))
        _console.print(f"  {kind:10} {good:6} of {total:6} ({100 * good / total:.1f}%)", highlight=False)
    for c in proofs:
        for survivor in c.survivors:
            _console.print(f"{c.name}: survives: {survivor}", highlight=False)
    for c in proofs:
        for failure in c.failures:
            _console.print(f"\n{c.name}: {failure}", highlight=False)


def comparison(reports: Sequence[Report]) -> None:
    """Print a table with a row for each strategy."""
    table = _grid("search", "substitutions", "modelled cost", "speed-up", "verified", "graphs", "seconds")
    for r in reports:
        table.add_row(
            r.search,
            str(sum(r.substitutions.values())),
            f"{r.cost_before * 1e3:.3f} -> {r.cost_after * 1e3:.3f} ms",
            ratio(r.speedup) + (" (original)" if r.returned_original else ""),
            {True: "yes", False: "NO", None: "-"}[r.verified],
            str(r.expanded),
            f"{r.seconds:.1f}",
        )
    _console.print(table)


def batch(data: Mapping[str, Any], page: Path) -> None:
    """Print a row for each model of a batch (`Batch.to_json`), why models failed, and where the page is."""
    table = _grid("model", "operators", "latency", "speed-up", "verified", "seconds")
    for row in data["rows"]:
        report, seconds = row["report"], "earlier" if row["earlier"] else f"{row['seconds']:.1f}"
        if report is None:
            table.add_row(row["name"], "failed", "", "", "", seconds)
            continue
        before, after = report["latency_before_ms"], report["latency_after_ms"]
        table.add_row(
            row["name"],
            f"{report['nodes_before']} -> {report['nodes_after']}",
            f"{ms(before)} -> {ms(after)}" if after is not None else ms(before),
            _gained(report),
            {True: "yes", False: "NO", None: "-"}[report["verified"]],
            seconds,
        )
    _console.print(table)
    for row in data["rows"]:
        if row["error"] is not None:
            _console.print(f"{row['name']}: {row['error']}")
        if row["report"] is not None and row["report"]["returned_original"]:
            _console.print(f"{row['name']}: the original, unchanged ({row['report']['reason']})")
        for note in row["notes"]:
            _console.print(f"note: {row['name']}: {note}")
    mean = data["mean_speedup"]
    measured = (
        f"; {data['measured']} measured, {mean:.3f} times as fast in the geometric mean" if mean else ""
    )
    _console.print(
        f"\n{data['done']} of {data['models']} models done ({data['earlier']} earlier), {data['failed']} failed"
        f"{measured}; {data['seconds']:.0f} s"
    )
    _console.print(f"{page}: the page of all, open it in a browser")


def _gained(report: Mapping[str, Any]) -> str:
    """The speed-up of a result, as text, from `Report.to_json`."""
    if report["returned_original"]:
        return "the original"
    key = next((name for name in ("speedup", "decided") if report.get(name) is not None), None)
    if key is None:
        return "not measured"
    low, high = report[f"{key}_low"], report[f"{key}_high"]
    bounded = low is not None and high is not None
    text = f"{report[key]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if bounded else "")
    return text if key == "speedup" else f"decided at {text}"


def rules(listed: Sequence[Mapping[str, Any]]) -> None:
    """Print the rules of the library, or their statistics on a model."""
    if listed and "matched" in listed[0]:
        table = _grid("rule", "admitted", "refused", "ms", "commonest refusal")
        for row in listed:
            refused = row["refused"]
            commonest = max(refused.items(), key=lambda item: item[1])[0] if refused else ""
            table.add_row(
                row["name"], str(row["admitted"]), str(sum(refused.values())), f"{row['ms']:.2f}", commonest
            )
    else:
        table = _Table(box=None, pad_edge=False)
        for header in ("rule", "family", "backend", "proof", "equation"):
            table.add_column(header, overflow="fold")
        for row in listed:
            table.add_row(row["name"], row["family"], row["backend"] or "all", row["proof"], row["equation"])
    _console.print(table)


def bench(measured: Mapping[str, Any]) -> None:
    """Print a measurement as names and values, and what it shows."""
    table = _grid("", "")
    for key, value in measured.items():
        if key not in ("shapes", "at_sizes", "caches", "notes"):
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    _console.print(table)
    given = measured.get("shapes", {})
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in given.items())
    if shapes:
        _console.print(f"measured with {shapes}")
    for sizes, there in measured.get("at_sizes", {}).items():
        speedup = SpeedUp(there["speedup"], there["speedup_low"] or 0.0, there["speedup_high"] or math.inf)
        _console.print(f"with {sizes}: {there['latency_ms']:.4g} ms, {speedup}")
    if measured.get("generate") is not None and measured["prefill_ms"] is None:
        _console.print(f"no prefill: the steps begin with {measured['prompt']} tokens in the cache")
    for note in measured.get("notes", ()):
        _console.print(f"note: {note}")
    if measured["disturbed"]:
        _console.print("note: other programs used the processor while it was measured")
    if measured["against"] != "itself":
        low, high = measured["speedup_low"] or 0.0, measured["speedup_high"] or math.inf
        speedup = SpeedUp(measured["speedup"], low, high)
        _console.print(f"speed-up of {measured['model']} over {measured['against']}: {speedup}")
    if measured.get("outputs_differ"):
        difference = measured["difference"]
        by = "not comparable, or not finite" if difference is None else f"{difference:.3g} of their RMS"
        _console.print(f"outputs differ: {measured['output']} after the last step, {by}")


def outputs(values: Mapping[str, Any]) -> None:
    """Print the outputs of a run: name, type, shape, and the minimum, maximum and mean of numeric outputs."""
    table = _grid("output", "type", "shape", "least", "greatest", "mean")
    for name, value in values.items():
        array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else None
        if array is None:
            table.add_row(name, type(value).__name__, "", "", "", "")
            continue
        shape = "x".join(map(str, array.shape)) or "scalar"
        numbers = array.dtype.kind in "biuf" and array.size > 0
        ends = (
            [f"{f(array.astype(np.float64)):.6g}" for f in (np.min, np.max, np.mean)] if numbers else [""] * 3
        )
        table.add_row(name, str(array.dtype), shape, *ends)
    _console.print(table)


def tuned(report: Mapping[str, Any], speedup: SpeedUp | None, control: SpeedUp | None, output: str) -> None:
    """Print the tuned kernels, the latencies of the compiled models, and which model was written."""
    table = _grid("kernel", "calls", "us", "GFLOP/s", "trials", title="Kernels, as tuned")
    for row in report["kernels"]:
        best = row["best_us"]
        rate = f"{row['flops'] / best / 1e3:.0f}" if best else ""
        table.add_row(
            row["name"], str(row["calls"]), f"{best:.1f}" if best else "untuned", rate, str(row["trials"])
        )
    if report["kernels"]:
        _console.print(table)
    if report["layers"]:
        _console.print(_layers(report["layers"]))
    if report["device"] is None:
        _console.print(f"ONNX Runtime: {ms(report['onnxruntime_ms'])}")
    _console.print(f"TVM, untuned: {ms(report['untuned_ms'])}")
    _console.print(f"TVM, tuned: {ms(report['tuned_ms'])}")
    if report["rewritten_ms"] is not None:
        _console.print(f"TVM, rewritten and tuned: {ms(report['rewritten_ms'])}")
    against = "ONNX Runtime" if report["device"] is None else f"the untuned model, on {report['device']}"
    _console.print(f"speed-up over {against}: {ratio(speedup)}")
    _console.print(f"the latter against itself: {ratio(control)}")
    _console.print(f"verification: {_verdict(report['verified'], report['max_error'])}")
    for row in report["kernels"]:
        if row["error"]:
            _console.print(f"note: {row['name']} could not be tuned: {row['error']}")
    for note in report["notes"]:
        _console.print(f"note: {note}")
    _console.print(f"{report['seconds']:.1f} s of tuning ({report['stop']})")
    _console.print(f"{output}: written ({report['written']})")


def _layers(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of convolutions and blocks of convolutions: the plain kernel, the heuristic's choice and the tuned choice
    for each, with their times in microseconds."""
    table = _grid(
        "layer", "calls", "plain us", "heuristic", "us", "chosen", "us", title="\nAlgorithms of convolutions"
    )
    for row in rows:
        times = [
            "" if row[key] is None else f"{row[key]:.1f}" for key in ("plain_us", "heuristic_us", "best_us")
        ]
        table.add_row(
            row["name"], str(row["calls"]), times[0], row["heuristic"], times[1], row["algorithm"], times[2]
        )
    return table


def verification(result: Verification) -> None:
    """Print a row for each output, and the verdict."""
    table = _grid(*HEADERS)
    for output in result.outputs:
        table.add_row(*output.row)
    if result.outputs:
        _console.print(table)
    if result.bindings:
        _console.print(f"sizes: {result.sizes}")
    if result.values:
        _console.print(f"values: ordinary; {'; '.join(result.values)}")
    for size in result.left_out:
        _console.print(f"not run: {size}")
    for note in result.notes:
        _console.print(f"note: {note}")
    _console.print(result.message())
