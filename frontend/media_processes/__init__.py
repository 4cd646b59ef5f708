"""Fork server, messages and memory limit of the processes that decode and process media.

Free of vLLM, so that it imports at once. The processes run ``processing/child.py``.
"""

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
