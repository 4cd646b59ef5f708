"""Starting simulated workers and servers."""

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.processes import HttpServer, Process, start_plain_vllm, start_worker
from tests.simgpu.gpu import GpuModel
from tests.simgpu.stats import FOLDER_VARIABLE

EXECUTOR = "--distributed-executor-backend=tests.simgpu.executor.SimExecutor"
"""The only flag. Not ``--worker-cls``: on CPU, vLLM then adds a third process and a queue."""


def start_sim_worker(
    name: str,
    model: Path,
    discovery: Path | str,
    logs: Path,
    *flags: str,
    stats: Path,
    gpu: GpuModel,
) -> Process:
    """A worker of ours.

    Args:
        stats: the folder for the engine's totals.
        gpu: how fast it is.
    """
    env = gpu.to_env() | {FOLDER_VARIABLE: str(stats)}
    return start_worker(name, model, discovery, logs, EXECUTOR, *flags, env=env)


def start_sim_vllm(
    model: Path, logs: Path, flags: Sequence[str], *, stats: Path, gpu: GpuModel
) -> HttpServer:
    """vLLM's own server."""
    env = gpu.to_env() | {FOLDER_VARIABLE: str(stats)}
    return start_plain_vllm(model, logs, EXECUTOR, *flags, name="simulated-vllm", env=env)
