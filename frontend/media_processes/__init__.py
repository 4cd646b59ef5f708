"""What a frontend and its processes for media say to each other. Without vLLM, so that it is
read at once.
"""

from frontend.media_processes.deadline import Deadline
from frontend.media_processes.memory_limit import MemoryLimit, is_out_of_memory, private_bytes
from frontend.media_processes.messages import (
    FORK,
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

__all__ = [
    "FORK",
    "Answer",
    "BatchFailed",
    "Deadline",
    "Fault",
    "MemoryLimit",
    "NoRoom",
    "Offsets",
    "Ready",
    "Result",
    "Results",
    "StartUp",
    "Wants",
    "Written",
    "is_out_of_memory",
    "private_bytes",
]
