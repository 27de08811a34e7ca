"""One optimisation, phase by phase: prepare, explore, finish, results.

A phase is a function of values, and reads a `Context`. The phase `finish` is a loop over candidates: each candidate is
compared with the original, verified, and accepted or rejected. All phases represent a model as an `Artifact`.
"""

from xrlflow.pipeline.results import Result
from xrlflow.pipeline.run import optimize
from xrlflow.pipeline.training import train
from xrlflow.pipeline.tuning import Tuned, tune
from xrlflow.pipeline.verifier import VerificationFailed

__all__ = ["Result", "Tuned", "VerificationFailed", "optimize", "train", "tune"]
