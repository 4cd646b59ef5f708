"""``--enable-ssl-refresh``: new connections get the certificate that is in the files by then."""

import asyncio
import logging
from pathlib import Path
from typing import Final

import uvicorn
from uvicorn.config import create_ssl_context

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often the files are looked at."""


class TlsRefresh:
    """Follows the files of a server's TLS."""

    def __init__(self, config: uvicorn.Config) -> None:
        """
        Args:
            config: loaded, and with TLS.
        """
        self._config = config
        names = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        self._paths = [Path(name) for name in names if name is not None]
        self._seen = self._state()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take what is in the files, if they have changed."""
        state = await asyncio.to_thread(self._state)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._load()
        except OSError as error:  # that of TLS is one
            logger.warning("the TLS files have changed and can't be used as yet: %s", error)
        else:
            logger.info("the TLS files have changed: new connections get what is in them")

    def _state(self) -> list[tuple[int, int, int] | None]:
        """Whatever changes with the files; a link may lead to another."""
        state: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError:
                state.append(None)  # it is being replaced
            else:
                state.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return state

    def _load(self) -> None:
        """On the event loop, between handshakes. Errors leave the server what it has."""
        config = self._config
        context = config.ssl
        if context is None or config.ssl_certfile is None:
            return
        # What fits together by itself may be loaded; half of it would break all handshakes.
        create_ssl_context(
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            password=config.ssl_keyfile_password,
            ssl_version=config.ssl_version,
            cert_reqs=config.ssl_cert_reqs,
            ca_certs=config.ssl_ca_certs,
            ciphers=config.ssl_ciphers,
        )
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
