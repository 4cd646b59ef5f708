"""What engines have done, for whoever runs a race: written here, read in ``totals.py``."""

import atexit
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

WRITE_EVERY_S = 1.0

FOLDER_VARIABLE = "SIMGPU_STATS_DIR"
"""Where each engine keeps ``<pid of EngineCore>.json``; none is written unless this is set."""


@dataclass
class Stats:
    """Totals since the engine started.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache at first scheduling.
        loaded_items: media whose encodings came from host memory.
        busy_seconds: modelled GPU time.
        late_seconds: the engine woke up too late after a step.
        stall_seconds: the device was idle although a running sequence had work for it.
        cpu_seconds: CPU time of the EngineCore process, start-up excluded.
    """

    steps: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    encoder_items: int = 0
    encoder_tokens: int = 0
    loaded_items: int = 0
    busy_seconds: float = 0.0
    late_seconds: float = 0.0
    stall_seconds: float = 0.0
    cpu_seconds: float = 0.0


class StatsFile:
    """Rewrites an engine's file after changes, at most once a second, and at exit."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._changed = threading.Event()
        self._cpu_at_start = 0.0
        self._lock = threading.Lock()
        folder = os.environ.get(FOLDER_VARIABLE)
        self._path = Path(folder) / f"{os.getpid()}.json" if folder else None

    def start(self) -> None:
        """Begin to write; the CPU time used so far counts as start-up."""
        self._cpu_at_start = time.process_time()
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.write()
            threading.Thread(target=self._run, name="simgpu-stats", daemon=True).start()
            atexit.register(self.write)

    def changed(self) -> None:
        """Have the totals written soon."""
        self._changed.set()

    def write(self) -> None:
        """Write the totals now; readers see the old file or the new one, never a part."""
        if not self._path:
            return
        with self._lock:
            self._stats.cpu_seconds = time.process_time() - self._cpu_at_start
            partial = self._path.with_suffix(".tmp")
            partial.write_text(json.dumps(asdict(self._stats)) + "\n")
            partial.replace(self._path)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self.write()
            time.sleep(WRITE_EVERY_S)
