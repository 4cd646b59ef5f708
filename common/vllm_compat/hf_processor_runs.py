"""How often vLLM's renderer runs the Hugging Face processor; one process may have several.

Both sides count, so that anyone can see that an item is processed once and by the
frontend. :mod:`common.vllm_compat.renderer_patches` has a renderer's processor counted.
"""

from common.identity import WorkerId
from common.observability.telemetry import HF_PROCESSOR_RUNS


class HfProcessorRuns:
    """The count of one renderer's processor. Text-only models never count.

    Attributes:
        total: runs since the start.
    """

    def __init__(self, *, side: str, worker_id: WorkerId | None) -> None:
        """Start from none.

        Args:
            side: ``frontend`` or ``worker``, a metric label.
            worker_id: label of the worker, None on the frontend.
        """
        self.total = 0
        self._gauge = HF_PROCESSOR_RUNS.labels(side, worker_id or "")

    def reset(self) -> None:
        """Start again from none, so that warm-up is left out."""
        self._gauge.dec(self.total)
        self.total = 0

    def add(self, runs: int) -> None:
        """Count runs, here or by another process on this one's behalf."""
        self.total += runs
        self._gauge.inc(runs)
