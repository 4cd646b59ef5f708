"""What child processes import first, and the routing library: without the seconds of vLLM."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "common.transfer.arena",
        "common.transfer.nixl_processes.reader",
        "common.transfer.nixl_processes.server",
        "common.transfer.shared_arena",
        "frontend.__main__",
        "common.aio.fork_server",
        "frontend.processes",
        "frontend.router",
    ],
)
def test_neither_vllm_nor_pytorch_is_imported(module: str) -> None:
    script = f"import sys, {module}; print({{'vllm', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    heavy = f"{module} imports {done.stdout} {done.stderr}: import that where it is needed"
    assert (done.stdout.strip(), done.stderr) == ("set()", ""), heavy
