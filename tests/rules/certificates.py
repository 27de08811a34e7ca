"""Certificates of the rules' proofs: `python -m tests.rules.certificates [NAMES]` (`make proofs`).

certificates.json has, for each rule, a digest of all that its proof depends on (`dependencies`), and what was proven
with which seeds. A proof is deterministic: while the digest holds, proving again would do the same. The tests prove the
rules whose digest does not hold.

This program proves all rules (or these) with their seeds and with a fresh one, which it prints, and writes the file
after each. With `--stale` it proves those whose digest does not hold, without a fresh seed. Exit code 1: a rule was not
proven; then its certificate is removed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rewrite_rules import LIBRARY
from tests.rules.dependencies import Sources, versions
from xrlflow.prover import prove
from xrlflow.prover.proof import Certificate
from xrlflow.rewrite import AnyRule

FILE = Path(__file__).with_name("certificates.json")
# Of a rule's mutants at least so many are rejected, and all but two at most if they are few.
_LEAST_REJECTED = 0.7
# Rules with which a demand was not met, or a mutant survived, by the luck of a seed; and seeds for each.
_ONCE_UNLUCKY: Mapping[str, tuple[int, ...]] = {
    "AssociateMatMulsRight": (1, 3),
    "AssociateSharedMatMuls": (2, 4),
    "FoldAffineIntoReaders": (1, 3),
    "FoldBatchNormIntoConvTranspose": (2, 4),
    "FoldBatchNormIntoMatMul": (1, 4),
    "FoldGemmIntoGemm": (3, 4),
    "FuseAttention": (2, 4),
    "FuseMomentsLayerNormalization": (1, 2),
    "FuseTransposeIntoRightOfMatMul": (2, 3),
    "FuseTransposedScale": (2, 4),
    "FuseUnrolledGRU": (1,),
    "MergeFlattenedTranspose": (1, 3),
    "MergeStackOfPieces": (2, 4),
    "PullProductOutOfConcatOfColumns": (3, 4),
    "PushKeyWeightsIntoQueries": (1, 3),
    "PushMonotoneThroughMax": (1, 4),
    "PushReshapeThroughMatMul": (2, 4),
    "PushReshapeUp": (1, 3),
    "PushReshapesDown": (1, 2),
    "PushReshapesUp": (1, 4),
    "PushSliceIntoAttention": (2, 4),
    "PushSliceThroughBroadcast": (2, 3),
    "PushSliceThroughNormalization": (1, 3),
    "PushSliceThroughWindows": (1, 2),
    "PushWeightsOutOfAttention": (3, 4),
    "ReplaceAttentionByMultiHead": (1, 4),
    "SplitDilatedConvIntoPhases": (1, 3),
    "SplitGemm": (2, 3),
}


def seeds(rule: AnyRule) -> tuple[int, ...]:
    """The seeds that a rule is proven with."""
    return (0, *_ONCE_UNLUCKY.get(rule.name, ()))


def digest(rule: AnyRule, sources: Sources, versions: Mapping[str, str]) -> str:
    """A digest of what the proof of a rule depends on, and of what is demanded of it."""
    own = sources.digest(sources.of_rule(type(rule).__module__, type(rule).__name__))
    demands = [str(_LEAST_REJECTED), *map(inspect.getsource, (faults, proven))]
    parts = [sources.prover_digest, own, json.dumps(versions, sort_keys=True), *demands]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@cache
def _sources() -> Sources:
    return Sources()


@cache
def _certificates() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return found


def stands(rule: AnyRule) -> bool:
    """Whether a rule was proven with its seeds, and nothing that its proof depends on has changed since."""
    row = _certificates().get(rule.name)
    return (
        row is not None
        and set(seeds(rule)) <= set(row["seeds"])
        and row["digest"] == digest(rule, _sources(), versions())
    )


def faults(rule: AnyRule, found: Certificate) -> list[str]:
    """What is wrong with a proof: failures, mutants that survived without a reason, too few mutants rejected."""
    wrong = [*found.failures, *(f"survived: {s}" for s in found.unexplained)]
    if found.mutants_rejected < min(_LEAST_REJECTED * found.mutants, found.mutants - 2):
        wrong.append(f"{found.mutants_rejected} of {found.mutants} mutants were rejected: {found.survivors}")
    if rule.proof == "field" and found.bound >= 1e-12:
        wrong.append(f"a false rule passes with a probability of {found.bound}")
    if rule.proof != "field" and not rule.relies_on:
        wrong.append("say which property of a function the rule relies on")
    return wrong


def proven(rule: AnyRule, wanted: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Prove a rule with some seeds: the row of its certificate, and what is wrong."""
    found = [prove(rule, seed) for seed in wanted]
    wrong = [f"seed {seed}: {text}" for seed, each in zip(wanted, found) for text in faults(rule, each)]
    first = found[0]
    row = {
        "digest": digest(rule, _sources(), versions()),
        "seeds": list(wanted),
        "proof": first.proof,
        "cases": min(each.admitted for each in found),
        "bound": max(each.bound for each in found),
        "bits": max((each.bits for each in found if each.bits is not None), default=None),
        "mutants": [min(each.mutants_rejected for each in found), first.mutants],
    }
    return row, wrong


def _by_name(name: str, wanted: Sequence[int]) -> tuple[str, dict[str, Any], list[str]]:
    (rule,) = (rule for rule in LIBRARY if rule.name == name)
    return name, *proven(rule, wanted)


def _write(rows: dict[str, dict[str, Any]]) -> None:
    kept = {rule.name: rows[rule.name] for rule in LIBRARY if rule.name in rows}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in kept.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove rules, and keep certificates.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--stale", action="store_true", help="only what has changed")
    parser.add_argument("--seed", type=int, help="the fresh seed; default: a random one")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    fresh = given.seed if given.seed is not None else random.SystemRandom().randrange(5, 10**6)
    extra = () if given.stale else (fresh,)
    chosen = [r for r in LIBRARY if not given.names or r.name in given.names]
    chosen = [r for r in chosen if not (given.stale and stands(r))]
    print(f"{len(chosen)} rules" + (f", fresh seed {fresh}" if extra else ""), flush=True)
    rows, failed = dict(_certificates()), 0
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_by_name, r.name, (*seeds(r), *extra)) for r in chosen]
        for future in futures:
            name, row, wrong = future.result()
            rows.pop(name, None)
            if wrong:
                failed += 1
                print(f"{name}: {'; '.join(wrong)}", flush=True)
            else:
                rows[name] = row
            _write(rows)
    print(f"{len(chosen) - failed} proven, {failed} failed; {len(rows)} of {len(LIBRARY)} certificates")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
