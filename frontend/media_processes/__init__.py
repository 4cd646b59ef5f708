"""What a frontend and its processes for media say to each other. Without vLLM, so that it is
read at once.
"""

from frontend.media_processes.deadline import Deadline
from frontend.media_processes.messages import (
    Answer,
    BatchFailed,
    Fault,
    NoRoom,
    Offsets,
    Ready,
    Result,
    Results,
    StartUp,
    Wants,
    Written,
)
from frontend.media_processes.parent import end_with_parent

__all__ = [
    "Answer",
    "BatchFailed",
    "Deadline",
    "Fault",
    "NoRoom",
    "Offsets",
    "Ready",
    "Result",
    "Results",
    "StartUp",
    "Wants",
    "Written",
    "end_with_parent",
]
