"""Cost models (computed by the roofline, profiled, learned, measured), the calibration of a machine, and the database
of measurements."""

from xrlflow.cost.calibrate import calibrated
from xrlflow.cost.database import Database
from xrlflow.cost.in_context import InContextBenchmark
from xrlflow.cost.kernels import KernelPrices
from xrlflow.cost.learned import Learned, load_network
from xrlflow.cost.machine import Machine
from xrlflow.cost.measured import Measured
from xrlflow.cost.model import AdditiveCost, CostModel, NoTimeLeft, Provenance, in_time
from xrlflow.cost.over_sizes import OverSizes, at_usual_size
from xrlflow.cost.placement_cost import PlacementCost
from xrlflow.cost.profiled import PriceCounts, Profiled
from xrlflow.cost.roofline import Roofline

__all__ = [
    "AdditiveCost",
    "CostModel",
    "Database",
    "InContextBenchmark",
    "KernelPrices",
    "Learned",
    "Machine",
    "Measured",
    "NoTimeLeft",
    "OverSizes",
    "PlacementCost",
    "PriceCounts",
    "Profiled",
    "Provenance",
    "Roofline",
    "at_usual_size",
    "calibrated",
    "in_time",
    "load_network",
]
