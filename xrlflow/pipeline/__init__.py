"""One optimisation, phase by phase: prepare, explore, finish (choose, confirm), results.

Each phase takes values and returns values; none reaches back. `Context` has what all of them read.
"""

from xrlflow.pipeline.results import Result
from xrlflow.pipeline.run import optimize
from xrlflow.pipeline.training import train
from xrlflow.pipeline.tuning import Tuned, tune
from xrlflow.pipeline.verifier import VerificationFailed

__all__ = ["Result", "Tuned", "VerificationFailed", "optimize", "train", "tune"]
