"""How fast NIXL reads from another process, into host memory and into the GPU's.

    python -m tests.gpu.nixl_reads [--device cuda]

Each kind of memory has a pair of processes of its own, so that one that ends takes no other with
it. Prints one JSON line, a :class:`tests.gpu.results.Reads`.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import torch
from nixl import nixl_agent, nixl_agent_config

from tests.gpu.host_to_device import SIZES
from tests.gpu.results import Reads

GPU: Final = "cuda:0"
KINDS: Final = {
    "host_to_host": ("cpu", "cpu"),
    "host_to_gpu": ("cpu", GPU),
    "gpu_to_gpu": (GPU, GPU),
}
"""Where the other process has the bytes, and where they go."""

MOST: Final = max(SIZES.values())
_REPEAT: Final = 20
_WARM_UP: Final = 2
_START_S: Final = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    gb_s: dict[str, float] = {}
    failed: dict[str, str] = {}
    for kinds, (source, target) in KINDS.items():
        if options.device == "cpu" and GPU in (source, target):
            continue
        try:
            gb_s |= {f"{kinds}_{size}": rate for size, rate in _in_a_pair(source, target).items()}
        except (RuntimeError, TimeoutError) as error:
            failed[kinds] = str(error)[-400:]
    sys.stdout.buffer.write(msgspec.json.encode(Reads(gb_s, failed)) + b"\n")


def _in_a_pair(source: str, target: str) -> dict[str, float]:
    """Rates by size. Raises RuntimeError or TimeoutError for a process that did not get so far."""
    context = multiprocessing.get_context("spawn")
    told, reports = context.Pipe(duplex=False)
    serving, asked = context.Pipe()
    server = context.Process(target=_serve, args=(serving, source), daemon=True)
    reader = context.Process(target=_read, args=(asked, reports, target), daemon=True)
    for process in (server, reader):
        process.start()
    reports.close()
    try:
        if not told.poll(_START_S):
            raise TimeoutError(f"no READ within {_START_S} s")
        try:
            rates: dict[str, float] = told.recv()
        except EOFError:
            reader.join()
            raise RuntimeError(f"the reader ended with status {reader.exitcode}") from None
        return rates
    finally:
        for process in (server, reader):
            process.kill()
            process.join()


def _bytes(size: int) -> Any:
    return torch.arange(size, dtype=torch.int64).to(torch.uint8)


def _agent(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _serve(pipe: Connection, device: str) -> None:
    """Offer bytes to be read until the other end is gone."""
    agent = _agent("server")
    data = _bytes(MOST).to(device)
    agent.register_memory([data])
    pipe.send((agent.get_agent_metadata(), data.data_ptr(), "DRAM" if device == "cpu" else "VRAM"))
    pipe.poll(None)


def _read(pipe: Connection, reports: Connection, device: str) -> None:
    agent = _agent("reader")
    into = torch.zeros(MOST, dtype=torch.uint8, device=device)
    agent.register_memory([into])
    metadata, address, memory = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    rates = {}
    for name, size in SIZES.items():
        remote = agent.get_xfer_descs([(address, size, 0)], mem_type=memory)
        local = agent.get_xfer_descs([into[:size]])
        seconds = [_read_once(agent, peer, local, remote) for _ in range(_WARM_UP + _REPEAT)]
        if not torch.equal(into[:size].cpu(), _bytes(size)):
            raise RuntimeError("other bytes arrived than were read")
        into.zero_()
        rates[name] = round(size / statistics.median(seconds[_WARM_UP:]) / 1e9, 2)
    reports.send(rates)


def _read_once(agent: Any, peer: str, local: Any, remote: Any) -> float:
    """Seconds that a READ takes."""
    handle = agent.initialize_xfer("READ", local, remote, peer)
    began = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"a READ ended as {state}")
    return seconds


if __name__ == "__main__":
    main()
