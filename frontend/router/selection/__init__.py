"""Load, speed and media of each worker, and the cost of a request there."""

from frontend.router.selection.costs import (
    Candidates,
    Estimate,
    Estimator,
    Work,
    cheapest,
    cost_of_load,
    cost_of_work,
    parts_of_cost,
)
from frontend.router.selection.load import BusyThresholds, LoadTracker, Slots, TargetLoad
from frontend.router.selection.media_placement import EncodedMedia, MediaPlacement
from frontend.router.selection.step_times import StepTimes
