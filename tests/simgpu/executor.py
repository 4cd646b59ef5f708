"""The executor: puts the simulated worker into the EngineCore process."""

import os
from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer.ec_connector import encoder_output_width
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.simgpu import host_memory


class SimExecutor(UniProcExecutor):
    """Runs ``SimWorker`` in the EngineCore process: no further process, no message queue.

    vLLM's CPU platform replaces ``uni`` by ``mp`` and switches async scheduling off. It leaves an
    executor named by its path alone, and the engine reads the scheduling mode after it has built
    the executor, so both are put right here.
    """

    def _init_executor(self) -> None:
        self.parallel_config.worker_cls = "tests.simgpu.worker.SimWorker"
        self.scheduler_config.async_scheduling = os.environ.get("SIMGPU_ASYNC", "1") != "0"
        host_memory.install()
        super()._init_executor()

    def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Ask the worker. What its encoder makes of a dummy is known without one."""
        if getattr(method, "__module__", "") == encoder_output_width.__name__:
            width = self.model_config.get_inputs_embeds_size()
            limit = self.model_config.get_multimodal_config().get_limit_per_prompt
            return [{each: width for each in ("image", "video", "audio") if limit(each)}]
        return super().collective_rpc(method, *args, **options)
