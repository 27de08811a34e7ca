"""Why a verification cannot be made. One that was made and failed is a result, not an error."""

from __future__ import annotations


class VerificationError(ValueError):
    """Two models cannot be compared. The message is one line that says what to do."""


class InputsNeeded(VerificationError):
    """No inputs were found on which the original runs: the user has to give some (`--inputs`)."""


class BadInputs(VerificationError):
    """The user's inputs do not fit the model."""


class OriginalFails(VerificationError):
    """ONNX Runtime cannot load or run the original."""
