"""All of vLLM's ways from a worker to its engine, by the flags and variables that choose them."""

from tests.e2e.processes import SEPARATE_EXECUTOR

HOPS: dict[str, tuple[list[str], dict[str, str]]] = {
    "cache-lru-small": (["--mm-processor-cache-gb=0.002"], {}),
    "cache-shm": (
        ["--mm-processor-cache-type=shm", "--mm-processor-cache-gb=0.1", SEPARATE_EXECUTOR],
        {},
    ),
    "no-cache-direct-rpc": (["--mm-processor-cache-gb=0"], {}),
    "no-cache-torch-shm": (
        ["--mm-processor-cache-gb=0", "--mm-tensor-ipc=torch_shm", SEPARATE_EXECUTOR],
        {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    ),
}
