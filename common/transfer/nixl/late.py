"""The frontend's end of NIXL where nothing is started before a worker needs it."""

from collections.abc import Callable
from typing import ClassVar

from common.errors import ConfigurationError
from common.transfer.arena import ArenaAccess
from common.transfer.base import LateSender
from common.transfer.handshake import TransferReply
from common.transfer.metadata import Transport
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes import NixlNetwork, nixl_installed


class LateNixl(LateSender):
    """A process that serves the arena, which takes a second to start."""

    transport: ClassVar[Transport] = "nixl"

    def __init__(self, arena: ArenaAccess, network: NixlNetwork) -> None:
        self._arena = arena
        self._network = network

    def reaches(self, terms: TransferReply) -> bool:
        return (
            nixl_installed()
            and terms.could_nixl
            and self._network.reaches(same_ipc=terms.same_ipc, same_loopback=terms.same_loopback)
        )

    def start(self, given_up: Callable[[], bool] = lambda: False) -> NixlSender:
        try:
            return NixlSender(self._arena, self._network, given_up=given_up)
        except ConfigurationError as error:
            raise ConfigurationError(f"NIXL can't be had: {error}") from error
