"""What a request would cost at each worker, and which one is chosen."""

from frontend.router.selection.candidates import Candidates, cheapest
from frontend.router.selection.ejection import Circuit, Ejection
from frontend.router.selection.estimate import Estimate, Estimator
from frontend.router.selection.load import BusyThresholds, LoadTracker, TargetLoad
from frontend.router.selection.media_placement import MediaPlacement, MediaStatistics
from frontend.router.selection.selector import Selector, Work

__all__ = [
    "BusyThresholds",
    "Candidates",
    "Circuit",
    "Ejection",
    "Estimate",
    "Estimator",
    "LoadTracker",
    "MediaPlacement",
    "MediaStatistics",
    "Selector",
    "TargetLoad",
    "Work",
    "cheapest",
]
