"""What keeps a verification from being made. A verification that was made and failed is no error."""

from __future__ import annotations


class VerificationError(ValueError):
    """Two models could not be compared. The message is one line that says what to do."""


class InputsNeeded(VerificationError):
    """No inputs could be drawn on which the original runs: the user has to give some (`--inputs`)."""


class BadInputs(VerificationError):
    """The user's inputs do not fit the model."""


class OriginalFails(VerificationError):
    """ONNX Runtime cannot load or run the original."""
