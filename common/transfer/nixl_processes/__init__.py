"""Processes with a NIXL agent: their programs, restrictions and messages.

Without vLLM and PyTorch, so that they start fast, and expose little to an attacker.
"""

from common.transfer.nixl_processes.child import Start, wait
from common.transfer.nixl_processes.messages import (
    Channel,
    Connect,
    Disconnect,
    Done,
    FromReader,
    FromServer,
    Leased,
    NixlFailed,
    NixlPing,
    NixlPong,
    Read,
    Reading,
    Serving,
    ToReader,
    ToServer,
    Unusable,
)
from common.transfer.nixl_processes.network import NixlNetwork, narrowed, nixl_installed
