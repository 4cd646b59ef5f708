"""A process that reaches an agent's port and does what it likes; and one that denied itself
most things.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ArenaUnavailableError
from common.transfer.handshake import NixlOffer
from common.transfer.nixl_processes.agent import NixlAgent
from common.transfer.nixl_processes.child import Start, confine

ANY_ADDRESS = 1 << 12
"""Where the memory begins that a stranger claims to be registered."""


def stranger(offer: dict[str, Any]) -> Generator[Any, Any, None]:
    """For each (operation, address, size): what it read or None, or how it failed.

    Its description of the agent is forged: all memory of that process is registered in it.
    """
    known = NixlOffer.model_validate(offer)
    agent = NixlAgent("stranger", "peer")
    registered = struct.pack("<QQ", known.address, known.arena.size)
    metadata = known.unpack_metadata()
    assert registered in metadata
    forged = metadata.replace(registered, struct.pack("<QQ", ANY_ADDRESS, 1 << 47))
    memory = np.full(1 << 16, 0xEE, dtype=np.uint8)
    agent.register(memory.ctypes.data, memory.nbytes)
    agent.connect(forged)
    answer: Any = "connected"
    while True:
        operation, address, size = yield answer
        memory[:] = 0xEE
        try:
            handle = agent._agent.initialize_xfer(
                operation,
                agent._agent.get_xfer_descs([(memory.ctypes.data, size, 0)], "DRAM"),
                agent._agent.get_xfer_descs([(address, size, 0)], "DRAM"),
                known.agent,
            )
            state = agent._agent.transfer(handle)
            while state == "PROC":
                state = agent._state(known.agent, handle)
            answer = memory[:size].tobytes().hex() if operation == "READ" else state
        except (ArenaUnavailableError, *agent._errors) as error:
            answer = f"failed: {error}"


def confined(secret: str, other: int) -> Generator[Any, Any, None]:
    """What a confined process can still do: names of what it should not be able to.

    Args:
        secret: a file that it must not read.
        other: a process of this user.
    """
    start = Start(
        channel=0,
        memory=0,
        size=0,
        error_handling="peer",
        needs_files=False,
        parent=os.getppid(),
        torch_has_cuda=True,
        writable=False,
    )
    done = confine(start)
    libc = ctypes.CDLL(None, use_errno=True)

    def tries() -> dict[str, Any]:
        return {
            "read": lambda: os.open(secret, os.O_RDONLY),
            "write": lambda: os.open(secret, os.O_WRONLY),
            "create": lambda: os.open(secret + "-new", os.O_WRONLY | os.O_CREAT),
            "list": lambda: list(Path(secret).parent.iterdir()),
            "environment": lambda: os.open(f"/proc/{other}/environ", os.O_RDONLY),
            "arguments": lambda: os.open(f"/proc/{other}/cmdline", os.O_RDONLY),
            "memory": lambda: os.open(f"/proc/{other}/mem", os.O_RDONLY),
            "signal": lambda: os.kill(other, signal.SIGCONT),
        }

    able = []
    for name, attempt in tries().items():
        try:
            attempt()
        except OSError:
            continue
        able.append(name)
    if libc.ptrace(16, other, 0, 0) == 0:  # PTRACE_ATTACH
        able.append("trace")
    yield [done, able]
