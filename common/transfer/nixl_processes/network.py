"""Networks that NIXL may use, and UCX's configuration for them. Pure: the environment is read where
a process starts."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from common.errors import ConfigurationError

LOOPBACK: Final = "lo"

_THIS_HOST: Final = ("posix", "cma")
"""Shared memory and copies between processes: for processes of one user on one host. Nothing
listens but a Unix socket that carries no more than a wake-up."""

_OF_GPUS: Final = "cuda_copy"
"""On a host with an NVIDIA GPU, NIXL refuses to start without this transport, even where all GPUs
are hidden from it, as they are here: then it does nothing, of which UCX and NIXL warn."""

_IGNORED: Final = frozenset(("cuda", "cuda_copy", "cuda_ipc", "gdr_copy"))
"""Operators who name these mean the memory of GPUs, of which none is read here."""

_HARDWARE: Final = ("ib",)  # UCX's name for all that goes through an RDMA device

_HARDWARE_NAMES: Final = frozenset(
    (
        *("ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"),
        *("ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "srd"),
    )
)

_PASSED_ON: Final = ("LD_LIBRARY_PATH", "LANG", "LC_ALL")
_PREFIXES_PASSED_ON: Final = ("UCX_", "NIXL_")


def nixl_installed() -> bool:
    """Return whether NIXL can be imported, without importing it."""
    return importlib.util.find_spec("nixl") is not None


@dataclass(frozen=True)
class NixlNetwork:
    """Networks that the operator allows. ``interface`` is UCX's name, ``mlx5_0:1`` or ``eth0``,
    None for loopback. ``narrowed_to`` are the only UCX transports to use; empty for all."""

    interface: str | None = None
    allow_tcp: bool = False
    narrowed_to: tuple[str, ...] = ()

    @property
    def leaves_host(self) -> bool:
        """Whether another host can be reached at all."""
        return self.interface not in (None, LOOPBACK)

    def reaches(self, *, same_ipc: bool, same_loopback: bool) -> bool:
        """Return whether it may reach a process, given the common namespaces."""
        return self.leaves_host or (same_loopback if self.allow_tcp else same_ipc)

    @property
    def error_handling(self) -> str:
        """UCX's treatment of a dead peer (NIXL's ``ucx_error_handling_mode``). Shared memory can't
        detect one, and UCX refuses to connect if it must."""
        return "peer" if self.leaves_user else "none"

    @property
    def leaves_user(self) -> bool:
        """Whether other users may access the memory of a process with an agent: over TCP, and over
        devices whose protection is untested."""
        return not set(self.transports()) <= {"self", *_THIS_HOST}

    @property
    def needs_files(self) -> bool:
        return "posix" in self.transports()

    @property
    def registers_for_writing(self) -> bool:
        """Whether registered memory must be writable, as for RDMA devices."""
        return any(name in _HARDWARE_NAMES for name in self.transports())

    def transports(self) -> tuple[str, ...]:
        """Return UCX's transports. Raises ConfigurationError: UCX_TLS names a forbidden one."""
        allowed = ["self"]
        if not self.leaves_host or self.allow_tcp:
            # Other processes on this host get copies, whatever remote ones get.
            allowed += [] if self.allow_tcp else _THIS_HOST
        if self.leaves_host:
            allowed += _HARDWARE
        if self.allow_tcp:
            allowed += ["tcp"]
        if not self.narrowed_to:
            return tuple(allowed)
        names = {*allowed, *(_HARDWARE_NAMES if "ib" in allowed else ())}
        wanted = [name for name in self.narrowed_to if name not in _IGNORED]
        if unknown := set(wanted) - names:
            raise ConfigurationError(
                f"UCX_TLS names {', '.join(sorted(unknown))}, but NIXL may use only "
                f"{', '.join(allowed)} here: TCP takes --nixl-allow-tcp, RDMA --nixl-interface"
            )
        return tuple(dict.fromkeys(("self", *wanted)))

    def environment(self, given: Mapping[str, str], search_path: list[str]) -> dict[str, str]:
        """Return the environment of a process with an agent: only variables of UCX, NIXL and the
        library loader pass, so no API key."""
        passed_on = {
            name: value
            for name, value in given.items()
            if name in _PASSED_ON or name.startswith(_PREFIXES_PASSED_ON)
        }
        return {
            "NIXL_LOG_LEVEL": "ERROR",
            "UCX_HANDLE_ERRORS": "bt",  # rather than wait for a debugger
            "UCX_LOG_LEVEL": "error",
            **passed_on,
            "PYTHONPATH": ":".join(search_path),
            "UCX_TLS": ",".join((*self.transports(), _OF_GPUS)),
            "UCX_NET_DEVICES": self.interface or LOOPBACK,
            "CUDA_VISIBLE_DEVICES": "",  # memory of the host alone is read here, an engine's not
        }


def narrowed(ucx_tls: str | None) -> tuple[str, ...]:
    """Parse ``UCX_TLS`` for :attr:`NixlNetwork.narrowed_to`."""
    if ucx_tls is None or ucx_tls.strip() in ("", "all"):
        return ()
    return tuple(name.strip() for name in ucx_tls.split(",") if name.strip())
