"""The executor: puts the simulated worker into the EngineCore process."""

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SimExecutor(UniProcExecutor):
    """Runs ``SimWorker`` in the EngineCore process: no further process, no message queue.

    vLLM's CPU platform replaces ``uni`` by ``mp`` and switches async scheduling off. It leaves an
    executor named by its path alone, and the engine reads the scheduling mode after it has built
    the executor, so both are put right here.
    """

    def _init_executor(self) -> None:
        self.parallel_config.worker_cls = "tests.simgpu.worker.SimWorker"
        self.scheduler_config.async_scheduling = os.environ.get("SIMGPU_ASYNC", "1") != "0"
        super()._init_executor()
