"""What the processes of a server use, engines apart."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.gpu.results import Cost

_TICK_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")


def cost_so_far(pid: int) -> Cost:
    """Sum over a process and its children since their start; an engine is not among them."""
    user, system, faults = 0, 0, 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            name, fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)
        except FileNotFoundError:
            continue  # it has ended
        if "EngineCor" in name:  # the kernel keeps 15 characters of VLLM::EngineCore
            continue
        fields_after_name = fields.split()
        # proc(5) counts from 1, and the state, the first one here, is its third.
        faults += int(fields_after_name[10 - 3])
        user += int(fields_after_name[14 - 3])
        system += int(fields_after_name[15 - 3])
    return Cost(user * _TICK_MS, system * _TICK_MS, faults)


def between(before: Cost, after: Cost) -> Cost:
    return Cost(
        after.user_ms - before.user_ms,
        after.system_ms - before.system_ms,
        after.faults - before.faults,
    )


def mean(costs: Sequence[Cost]) -> Cost | None:
    """Means: a tick is longer than much of what is measured, so a median says little."""
    if not costs:
        return None
    return Cost(
        *(
            round(statistics.fmean(getattr(each, field) for each in costs), 1)
            for field in Cost.__struct_fields__
        )
    )
