"""One optimisation, phase by phase: prepare, explore, finish (choose, confirm), results.

Each phase takes values and returns values; no phase calls an earlier one. All of them read a `Context`.
"""

from xrlflow.pipeline.results import Result
from xrlflow.pipeline.run import optimize
from xrlflow.pipeline.training import train
from xrlflow.pipeline.tuning import Tuned, tune
from xrlflow.pipeline.verifier import VerificationFailed

__all__ = ["Result", "Tuned", "VerificationFailed", "optimize", "train", "tune"]
