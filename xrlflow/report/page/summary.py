"""A result in a few lines of HTML, for a notebook."""

from __future__ import annotations

import html

from xrlflow.common.text import printable, shortened
from xrlflow.report.report import Report


def headline(report: Report) -> str:
    """The result in one sentence."""
    if report.returned_original:
        return f"The original, unchanged: {report.reason}"
    if report.speedup is not None:
        return f"{report.speedup.median:.2f} times as fast as the original"
    return f"Another graph: {report.reason}"


def summary_html(report: Report) -> str:
    """The headline and a small table, in the notebook's own style."""
    rows: list[tuple[str, str]] = [("model", shortened(printable(report.model), 80, 30))]
    if report.speedup is not None and report.speedup.bounded:
        rows.append(
            ("speed-up, 95% interval", f"{report.speedup.low:.3f} to {report.speedup.high:.3f}, measured")
        )
    if report.control is not None:
        rows.append(("original against itself", str(report.control)))
    if report.latency_before is not None and report.latency_after is not None:
        before, after = report.latency_before.median_ms, report.latency_after.median_ms
        rows.append(("latency", f"{before:.3f} ms before, {after:.3f} ms after, {report.threads} threads"))
    rows.append(("verification", {True: "equal", False: "different", None: "not checked"}[report.verified]))
    rows.append(("operators", f"{report.nodes_before} before, {report.nodes_after} after"))
    rows.append(("substitutions", str(sum(report.substitutions.values()))))
    cells = "".join(
        f'<tr><th scope="row" style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(printable(value))}</td></tr>'
        for name, value in rows
    )
    return f"<p><strong>{html.escape(printable(headline(report)))}</strong></p><table>{cells}</table>"
