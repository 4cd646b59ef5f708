"""Counts how often vLLM's renderer runs the Hugging Face processor.

Both sides count, so that anyone can see that an item is processed once and by the
frontend. Warm-up runs are left out by counting from the moment of installation.
"""

from collections.abc import Mapping
from typing import Any

from vllm.renderers import BaseRenderer

from common.identity import WorkerId
from common.telemetry import HF_PROCESSOR_RUNS


class HfProcessorRuns:
    """A counter on one renderer's processor. Text-only models never count.

    Attributes:
        total: runs since the start.
    """

    def __init__(self, renderer: BaseRenderer, *, side: str, worker_id: WorkerId | None) -> None:
        """Start counting.

        Args:
            renderer: the renderer whose multi-modal processor is watched.
            side: ``frontend`` or ``worker``, a metric label.
            worker_id: label of the worker, None on the frontend.
        """
        self.total = 0
        self._gauge = HF_PROCESSOR_RUNS.labels(side, worker_id or "")
        self._gauge.set(0)
        processor = renderer.mm_processor
        if processor is None:
            return
        original = processor._call_hf_processor

        def counted(hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> Any:
            self.add(1)
            return original(hf_data, hf_kwargs)

        # On the instance: the class is shared with processors that vLLM makes for
        # its own profiling.
        processor._call_hf_processor = counted

    def reset(self) -> None:
        """Start again from none, so that warm-up is left out."""
        self.total = 0
        self._gauge.set(0)

    def add(self, runs: int) -> None:
        """Count runs, here or by another process on this one's behalf."""
        self.total += runs
        self._gauge.set(self.total)
