"""What a request would cost at each worker, and which one is chosen."""

from frontend.router.selection.candidates import Candidates, cheapest
from frontend.router.selection.ejection import Ejection
from frontend.router.selection.encoded_media import EncodedMedia
from frontend.router.selection.estimate import Estimate, Estimator
from frontend.router.selection.load import BusyThresholds, LoadTracker, Reported, TargetLoad
from frontend.router.selection.media_placement import MediaPlacement
from frontend.router.selection.selector import (
    Costs,
    Selector,
    Work,
    cost_of_load,
    cost_of_work,
    parts_of_cost,
)
from frontend.router.selection.step_times import StepTimes

__all__ = [
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
    "Work",
    "cheapest",
    "cost_of_load",
    "cost_of_work",
    "parts_of_cost",
]
