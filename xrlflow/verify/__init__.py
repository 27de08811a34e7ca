"""Whether two ONNX models compute the same: both run on the same inputs, and rounding decides the tolerance. Inputs are
drawn at random (`inputs`), and bisection finds the substitution that breaks a model (`bisect`)."""

from xrlflow.verify.bisect import NotASubstitution, NotRepeatable, blame
from xrlflow.verify.branches import GUARD
from xrlflow.verify.cases import feeds_at_other_sizes, feeds_for_measurement
from xrlflow.verify.equivalence import (
    HEADERS,
    OutputReport,
    Reference,
    Status,
    Verification,
    not_exercised,
    verify,
)
from xrlflow.verify.errors import BadInputs, InputsNeeded, OriginalFails, VerificationError
from xrlflow.verify.inputs import Case

__all__ = [
    "GUARD",
    "HEADERS",
    "BadInputs",
    "Case",
    "InputsNeeded",
    "NotASubstitution",
    "NotRepeatable",
    "OriginalFails",
    "OutputReport",
    "Reference",
    "Status",
    "Verification",
    "VerificationError",
    "blame",
    "feeds_at_other_sizes",
    "feeds_for_measurement",
    "not_exercised",
    "verify",
]
