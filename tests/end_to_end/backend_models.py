"""ONNX's backend models through `optimize` without measuring: `python -m tests.end_to_end.backend_models --jobs 2`.

Each model that is a file of its own is optimised as by `optimize --no-measure` and verified. Counted are: the results,
the originals that came back, what was refused, and faults. A fault is a failed verification (exit code 1), an exception
that is no user's error, a process that ends, or a model that ONNX Runtime runs on the test's inputs and that is refused
(opsets newer than those that are read aside). Exit code 1 if there are faults.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from tests.corpus import KINDS, backend_tests, outputs, sample


def examined(index: int) -> tuple[str, str]:
    """What became of a model, and what was said of it."""
    import xrlflow
    from xrlflow.api import UserError, VerificationFailed
    from xrlflow.onnxio.versions import NEWEST

    case = sample(backend_tests(*KINDS)[index])
    original = case.proto.SerializeToString()
    try:
        report = xrlflow.optimize(original, measure=False, time_limit=30.0).report
    except VerificationFailed as error:
        return "FAULT", f"exit code 1: {error}"
    except UserError as error:
        runs = case.opset <= NEWEST and outputs(original, case.feeds) is not None
        return "FAULT" if runs else "refused", f"exit code 2: {error}"
    except Exception as error:
        return "FAULT", f"{type(error).__name__}: {error}"
    changed = "the original" if report.returned_original else "optimised"
    return changed, "" if report.verified or report.returned_original else "; ".join(report.notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="ONNX's backend models through optimize --no-measure.")
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    cases = backend_tests(*KINDS)
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(examined, index) for index in range(len(cases))]
        for case, future in zip(cases, futures):
            try:
                what, said = future.result()
            except BrokenProcessPool:
                what, said = "FAULT", "the process ended, or one beside it"
            counts[what] += 1
            if said and what != "refused":
                print(f"{case.name}: {what}: {said}", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())), f"of {len(cases)}")
    raise SystemExit(1 if counts["FAULT"] else 0)


if __name__ == "__main__":
    main()
