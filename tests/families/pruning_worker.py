"""An engine's worker on a CPU whose videos can be pruned.

vLLM 0.32's ``CPUModelRunner.load_model`` doesn't say whether they are, as its parent's does, so
that the first medium ends the engine: "Error during index put operation". ``--worker-cls`` puts
this one into both servers.
"""

from typing import Any

from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.v1.worker.cpu_worker import CPUWorker


class PruningWorker(CPUWorker):
    """Says what the parent forgets."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        runner.is_multimodal_pruning_enabled = supports_multimodal_pruning(runner.get_model())
