"""The errors that a user can correct."""

from __future__ import annotations

from xrlflow.backends import BackendError
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError
from xrlflow.search import TraceError
from xrlflow.storage.stores import StoreError
from xrlflow.verify import VerificationError

CORRECTABLE = (ModelError, BackendError, VerificationError, OptionError, TraceError, StoreError)
"""The messages of these errors are one line, and say what to do."""
