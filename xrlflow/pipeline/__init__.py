"""One optimisation, phase by phase: prepare, explore, finish, results.

Each phase takes values and returns values. All of them read a `Context`. To finish is one loop over candidates, which
are compared with the original, verified and decided on; a model is one `Artifact` in all of them.
"""

from xrlflow.pipeline.results import Result
from xrlflow.pipeline.run import optimize
from xrlflow.pipeline.training import train
from xrlflow.pipeline.tuning import Tuned, tune
from xrlflow.pipeline.verifier import VerificationFailed

__all__ = ["Result", "Tuned", "VerificationFailed", "optimize", "train", "tune"]
