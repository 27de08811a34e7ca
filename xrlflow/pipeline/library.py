"""The rule library as users see it: listed, proven, matched against a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from rewrite_rules import LIBRARY
from xrlflow.backends.onnxruntime import default_threads
from xrlflow.cost import Roofline
from xrlflow.onnxio import Source, load
from xrlflow.options import OptionError, check_seed
from xrlflow.rewrite import AnyRule, Library, RewriteState
from xrlflow.verify.rules import Certificate, prove_all, prove_in_processes


def _chosen(names: Sequence[str]) -> tuple[AnyRule, ...]:
    """The library's rules of these names, or all. Raises OptionError for a name that is not known."""
    known = {r.name: r for r in LIBRARY}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f": did you mean {', '.join(near)}?" if near else ": `xrlflow rules` lists them"
            raise OptionError(f"there is no rule {name!r}{hint}")
    return tuple(known[n] for n in names) if names else LIBRARY


def prove_rules(
    names: Sequence[str] = (),
    *,
    seed: int = 0,
    jobs: int | None = None,
    listener: Callable[[Certificate, int, int], None] | None = None,
) -> list[Certificate]:
    """Prove rules of the library (all of them by default): a certificate for each, in the library's order.

    `jobs` processes work (default: the physical cores); `listener` hears of each certificate, how many there are and
    how many there will be. Raises OptionError for a name that is not known.
    """
    check_seed(seed)
    rules = _chosen(names)
    found: dict[str, Certificate] = {}
    jobs = min(jobs or default_threads(), len(rules))
    if jobs == 1:
        certificates = prove_all(rules, seed)
    else:
        certificates = prove_in_processes(rules, seed, jobs)
    for certificate in certificates:
        found[certificate.name] = certificate
        if listener is not None:
            listener(certificate, len(found), len(rules))
    return [found[r.name] for r in rules]


def list_rules(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The library: name, family, equation, backend, proof, assumption of each rule, and what it is a composite of."""
    return [
        {
            "name": r.name,
            "family": r.family,
            "equation": r.equation,
            "backend": r.backend,
            "contrib": r.contrib,
            "proof": r.proof,
            "relies_on": r.relies_on,
            "assumes": r.assumes,
            "composite_of": list(r.composite_of),
        }
        for r in _chosen(names)
    ]


def rule_stats(model: Source, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the rules find in a model: admitted matches, refusals by reason (near misses), milliseconds."""
    library = Library(_chosen(names), contrib=True, timed=True, thorough=True)
    RewriteState.start(load(model).graph, library, Roofline().delta)
    rows = []
    for row in list_rules(names):
        stats = library.stats.get(row["name"])
        if stats is not None:
            found = {
                "matched": stats.matched,
                "admitted": stats.admitted,
                "refused": dict(stats.refused.most_common()),
                "ms": stats.seconds * 1e3,
            }
            rows.append(row | found)
    return sorted(rows, key=lambda r: -r["ms"])
