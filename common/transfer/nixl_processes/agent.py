"""NIXL's Python binding: one class, its errors mapped, and no progress thread.

Only for processes with nothing else: any peer that reaches an agent's port may read and write all
memory of its process.

The stock progress thread spins on a whole core from the first transfer on. Without it the owner
moves transfers by calling the agent, from one thread at a time.
"""

import secrets
from typing import Any, Final

from common.errors import ArenaUnavailableError, ConfigurationError

_BACKEND: Final = "UCX"
_MEMORY: Final = "DRAM"


class NixlAgent:
    """A NIXL agent with the UCX backend. Not thread-safe."""

    def __init__(self, role: str, error_handling: str) -> None:
        """Create an agent (half a second) whose name begins with ``role``; UCX treats a dead peer
        as ``peer`` or ``none`` says. Raises ConfigurationError: no NIXL, or no UCX."""
        try:
            from nixl import _api
        except ImportError as error:
            raise ConfigurationError(
                "NIXL can't be loaded; install nixl with nixl-cu12 or nixl-cu13, or set "
                f"DYNAMO_MM_TRANSFER=shm: {error}"
            ) from error
        bindings = _api.nixlBind
        self._errors = (
            bindings.nixlBackendError,
            bindings.nixlCancelledError,
            bindings.nixlInvalidParamError,
            bindings.nixlMismatchError,
            bindings.nixlNotAllowedError,
            bindings.nixlNotFoundError,
            bindings.nixlNotPostedError,
            bindings.nixlNotSupportedError,
            bindings.nixlRemoteDisconnectError,
            bindings.nixlRepostActiveError,
            bindings.nixlUnknownError,
        )
        self.name = f"mmrouter-{role}-{secrets.token_hex(8)}"
        try:
            self._agent = _api.nixl_agent(
                self.name, _api.nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            if _BACKEND not in self._agent.plugin_list:
                raise ConfigurationError(
                    f"NIXL has no {_BACKEND} backend here, only "
                    f"{', '.join(self._agent.plugin_list)}"
                )
            self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": error_handling})
        except (*self._errors, RuntimeError) as error:
            raise ConfigurationError(f"a NIXL agent can't be made: {error}") from error

    def register(self, address: int, size: int) -> None:
        """Register memory with the network. Raises ArenaUnavailableError: that failed."""
        try:
            self._agent.register_memory([(address, size, 0, "")], _MEMORY)
        except self._errors as error:
            raise ArenaUnavailableError(f"NIXL can't register {size} bytes: {error}") from error

    def metadata(self) -> bytes:
        """Return this agent's address and registered memory."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Add an agent, return its name; a transfer connects it. Raises ArenaUnavailableError."""
        try:
            name: str | bytes = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise ArenaUnavailableError(f"NIXL can't reach the frontend: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def disconnect(self, name: str) -> None:
        """Forget an agent without reads; bytes may still arrive. Raises ArenaUnavailableError."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            raise _gone(name, error) from error

    def progress(self) -> None:
        """Serve other agents' transfers. Between calls they stand still on a network that can't
        read memory by itself, such as TCP."""
        # There are no notifications; asking for them is the call that makes progress.
        self._agent.get_new_notifs()

    def read(self, peer: str, local: int, remote: int, size: int) -> "NixlRead":
        """Start copying a peer's registered memory into ours. Raises ArenaUnavailableError."""
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs([(local, size, 0)], _MEMORY),
                self._agent.get_xfer_descs([(remote, size, 0)], _MEMORY),
                peer,
            )
            state = self._agent.transfer(handle)
        except self._errors as error:
            raise _gone(peer, error) from error
        return NixlRead(self, peer, handle, state)

    def _state(self, peer: str, handle: Any) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
        except self._errors as error:
            raise _gone(peer, error) from error
        return state


class NixlRead:
    """A transfer under way. Its target is written to until :meth:`poll` says otherwise: neither
    releasing the handle nor forgetting the peer stops it."""

    def __init__(self, agent: NixlAgent, peer: str, handle: Any, state: str) -> None:
        self._agent = agent
        self._peer = peer
        self._handle = handle
        self._state = state

    def poll(self) -> bool:
        """Advance it; return if complete. Raises ArenaUnavailableError: no more bytes come."""
        if self._state == "PROC":
            self._state = self._agent._state(self._peer, self._handle)
        if self._state == "ERR":
            raise _gone(self._peer, "the transfer failed")
        return self._state == "DONE"


def _gone(peer: str, reason: object) -> ArenaUnavailableError:
    return ArenaUnavailableError(f"{peer} can't be read over NIXL: {reason}")
