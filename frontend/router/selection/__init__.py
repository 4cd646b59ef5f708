"""What a request would cost at each worker, and which one is chosen."""

from frontend.router.selection.candidates import Candidates, cheapest
from frontend.router.selection.ejection import Ejection
from frontend.router.selection.encoded_media import EncodedMedia
from frontend.router.selection.estimate import Estimate, Estimator
from frontend.router.selection.load import BusyThresholds, LoadTracker, Reported, TargetLoad
from frontend.router.selection.media_placement import MediaPlacement
from frontend.router.selection.selector import LOAD_WEIGHT, Costs, Selector, Weights, Work
from frontend.router.selection.step_times import StepTimes

__all__ = [
    "LOAD_WEIGHT",
    "BusyThresholds",
    "Candidates",
    "Costs",
    "Ejection",
    "EncodedMedia",
    "Estimate",
    "Estimator",
    "LoadTracker",
    "MediaPlacement",
    "Reported",
    "Selector",
    "StepTimes",
    "TargetLoad",
    "Weights",
    "Work",
    "cheapest",
]
