"""The rule library as users see it: select rules, list them, prove them, and match them against a model."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx.defs

from rewrite_rules import LIBRARY
from rewrite_rules.placement import PLACEMENT, Loses, placement_rules
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime.saturation import saturates
from xrlflow.backends.protocol import USE_ONNXRUNTIME
from xrlflow.backends.tvm import Tvm
from xrlflow.backends.tvm.lowering.importer import check_sizes
from xrlflow.cost import Roofline
from xrlflow.onnxio import ImportedModel, Source, load
from xrlflow.ops.schema import OPSET, split_op
from xrlflow.options import NONEMPTY, SATURATES, VNNI, OptionError, Options, check_seed
from xrlflow.pipeline.factories import factory_of
from xrlflow.pipeline.trace import read_trace
from xrlflow.prover import Certificate, prove_all, prove_by
from xrlflow.rewrite import AnyRule, Library, RegionRule, RewriteState, Rule, RuleError
from xrlflow.search.bodies import simplify
from xrlflow.workers import Processes


def library_for(options: Options) -> Library:
    """The rules that an optimisation may apply.

    Raises OptionError for unknown names, and for a file of rules that cannot be loaded or are not proven.
    """
    rules: tuple[AnyRule, ...] = tuple(LIBRARY)
    if options.rules is not None:
        rules += own_rules(options.rules, proven=not options.trust_rules, seed=options.seed)
    placing = placement_rules()
    selected = _selected((*rules, *placing), options)
    steps = () if options.replay is None else read_trace(options.replay).steps
    placed = any(step.family == PLACEMENT for step in steps)
    return Library(
        [rule for rule in selected if placed or rule not in placing], backend=options.runtime,
        contrib=options.backend_ops, assuming=(*options.assumptions, *_of_the_processor(options)),
        runs=runs if options.compiling else _written_at(options.opset), least_size=int(NONEMPTY in options.assumptions),
    )  # fmt: skip


def _written_at(opset: int | None) -> Callable[[str], bool] | None:
    """Whether an operator can be in a file of this opset, if the user names one: it has to be defined there, and by the
    definition of our graphs."""

    def written(op: str) -> bool:
        domain, name = split_op(op)
        if domain or opset is None or not onnx.defs.has(name, OPSET):
            return True
        return onnx.defs.has(name, opset) and onnx.defs.get_schema(name, opset).since_version <= OPSET

    return None if opset is None or opset == OPSET else written


def _of_the_processor(options: Options) -> tuple[str, ...]:
    """What rules may assume of the processor that the result is for.

    This processor is tried. Of any other we know nothing: unless the user says otherwise, sums of byte products
    saturate there, so a product that is exact everywhere stays so.
    """
    elsewhere = options.cpu is not None or options.triple is not None or options.remote is not None
    if elsewhere or options.portable:
        return () if VNNI in options.assumptions else (SATURATES,)
    return (SATURATES if saturates() else VNNI,)


@functools.cache
def runs(op: str) -> bool:
    """Whether TVM supports an operator, given by its name in the IR (`domain::name` for other domains)."""
    domain, _, name = op.rpartition("::")
    return Tvm().supports(name, domain)


def check_supported(imported: ImportedModel, library: Library) -> None:
    """Raise BackendError for inputs without fixed sizes, and for operators that TVM cannot lower and no rule
    decomposes.

    The message names the operators and, if a rule refused one, the reason: "LSTM (sequence_lens is given)".
    """
    check_sizes(value for value in imported.frame.graph.input if value.name not in imported.overridable)
    graph = imported.graph
    if all(runs(node.op) for node in graph.nodes()):
        return
    simplified, _ = simplify(graph, library, lambda _: 0.0)
    missing = sorted({node.op for node in simplified.nodes() if not runs(node.op)})
    if not missing:
        return
    expansions = library.canonicalising()
    RewriteState.start(simplified, expansions)
    named = []
    for op in missing:
        reasons = {
            reason
            for name, stats in expansions.stats.items()
            if op in getattr(expansions.rules[name], "anchors", ())
            for reason in stats.refused
        }
        named.append(f"{op} ({'; '.join(sorted(reasons))})" if reasons else op)
    raise BackendError(f"TVM cannot lower {', '.join(named)}", USE_ONNXRUNTIME)


def placing_rules(options: Options, loses: Loses) -> tuple[RegionRule, ...]:
    """The rules that a search with generated kernels uses in addition to those of the library (see
    `placement_rules`)."""
    rules = placement_rules(loses)
    return tuple(rule for rule in _selected((*LIBRARY, *rules), options) if rule in rules)


def _selected(rules: tuple[AnyRule, ...], options: Options) -> list[AnyRule]:
    """The rules that the options `only` and `exclude` admit. Raises OptionError for unknown names."""
    if options.only:
        rules = tuple(_named(rules, options.only, "only"))
    dropped = set(_named(rules, options.exclude, "exclude"))
    return [rule for rule in rules if rule not in dropped]


def _named(rules: Sequence[AnyRule], names: Iterable[str], option: str) -> list[AnyRule]:
    """The rules with these names or of these families, in the library's order. Raises OptionError."""
    if isinstance(names, str):
        raise OptionError(f"{option} is a text, {names!r}: give a list of names")
    requested = set(names)
    accepted = {r.name for r in rules} | {r.family for r in rules}
    for name in requested - accepted:
        raise OptionError(f"{option}: there is no rule or family {name!r}{_hint(name, accepted)}")
    return [r for r in rules if r.name in requested or r.family in requested]


def _hint(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), 3)
    return f": did you mean {', '.join(near)}?" if near else ": `xrlflow rules` lists them"


def own_rules(path: str | os.PathLike[str], proven: bool = True, seed: int = 0) -> tuple[AnyRule, ...]:
    """Run a Python file and return its RULES. Their family is the file's name.

    Raises OptionError if the file fails, if the library has a rule of the same name, or if a rule is not proven (unless
    `proven` is False).
    """
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"rules {file} is no file: give a Python file that has RULES")
    spec = importlib.util.spec_from_file_location(f"xrlflow_rules.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise OptionError(f"rules {file} is no Python file: give one that has RULES")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes look up their module
    try:
        spec.loader.exec_module(module)
        rules = tuple(module.RULES)
        Library([r for r in rules if isinstance(r, Rule | RegionRule)])  # this traces the rules' sources
    except (Exception, SystemExit) as error:  # a user's program may raise anything
        raise OptionError(f"rules {file}: {type(error).__name__}: {error}") from error
    used_names = {r.name for r in LIBRARY}
    for rule in rules:
        if not isinstance(rule, Rule | RegionRule):
            raise OptionError(
                f"rules {file}: RULES has {rule!r}, which is no rule: list instances, such as MyRule()"
            )
        if not isinstance(rule.name, str):
            raise OptionError(f"rules {file}: a rule is called {rule.name!r}: its name is that of its class")
        if rule.name in used_names:
            raise OptionError(f"rules {file}: the library has a rule {rule.name}: give yours another name")
        used_names.add(rule.name)
    for certificate in _certificates(rules, file, seed) if proven else ():
        if not certificate.proven:
            first, more = certificate.failures[0].splitlines()[0], f"xrlflow rules --prove --rules {file}"
            raise OptionError(f"rules {file}: {certificate.name} is not proven: {first}: `{more}` shows it")
    return rules


def _certificates(rules: Sequence[AnyRule], file: Path, seed: int) -> list[Certificate]:
    try:
        return list(prove_all(rules, seed))
    except RuleError as error:
        raise OptionError(f"rules {file}: {error}") from error


def _rules_named(names: Sequence[str], own: Path | None = None) -> tuple[AnyRule, ...]:
    """The rules with these names, from the library or from the file `own`; all of its rules if there are no names.
    Raises OptionError.
    """
    rules = LIBRARY if own is None else own_rules(own, proven=False)
    by_name = {r.name: r for r in rules}
    for name in names:
        if name not in by_name:
            raise OptionError(f"there is no rule {name!r}{_hint(name, by_name)}")
    return tuple(by_name[n] for n in names) if names else tuple(rules)


def prove_rules(
    names: Sequence[str] = (),
    *,
    own: Path | None = None,
    seed: int = 0,
    jobs: int | None = None,
    ray: str | None = None,
    listener: Callable[[Certificate, int, int], None] | None = None,
) -> list[Certificate]:
    """Prove rules of the library or of a file (`own`). Returns their certificates, in the order of the rules.

    `names`: by default all rules. `jobs`: workers, by default one for each physical core. `ray`: "local" or the
    HOST:PORT of a Ray cluster, where the workers run; the certificates are the same. `listener` receives each
    certificate, the number of certificates so far, and the number of all rules. Raises OptionError for unknown names,
    and if the cluster cannot be used.
    """
    check_seed(seed)
    rules = _rules_named(names, own)
    proven: dict[str, Certificate] = {}
    with factory_of(ray) as factory:
        certificates: Iterable[Certificate]
        if isinstance(factory, Processes) and (own is not None or len(rules) == 1 or jobs == 1):
            certificates = prove_all(rules, seed)
        else:
            count = min(jobs or factory.cores, len(rules))
            load = None if own is None else partial(own_rules, own.resolve(), proven=False)
            certificates = prove_by(factory, rules, seed, count, load)
        for certificate in certificates:
            proven[certificate.name] = certificate
            if listener is not None:
                listener(certificate, len(proven), len(rules))
    return [proven[r.name] for r in rules]


def list_rules(names: Sequence[str] = (), own: Path | None = None) -> list[dict[str, Any]]:
    """For each rule: its name, family, equation, backend, kind of proof, assumptions, permitted changes, and parts."""
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
            "may_round_inputs": r.may_round_inputs,
            "rounds_once": r.rounds_once,
            "may_lose_errors": list(r.may_lose_errors),
            "composite_of": list(r.composite_of),
        }
        for r in _rules_named(names, own)
    ]


def rule_stats(model: Source, names: Sequence[str] = (), own: Path | None = None) -> list[dict[str, Any]]:
    """For each rule, its matches in a model, its refusals by reason (near misses), and the milliseconds of matching."""
    library = Library(_rules_named(names, own), contrib=True, timed=True, thorough=True)
    RewriteState.start(load(model).graph, library, Roofline().delta)
    rows = []
    for row in list_rules(names, own):
        stats = library.stats.get(row["name"])
        if stats is not None:
            counts = {
                "matched": stats.matched,
                "admitted": stats.admitted,
                "refused": dict(stats.refused.most_common()),
                "ms": stats.seconds * 1e3,
            }
            rows.append(row | counts)
    return sorted(rows, key=lambda r: -r["ms"])
