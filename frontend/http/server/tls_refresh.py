"""``--enable-ssl-refresh``: new connections get the certificate that is in the files by then."""

import logging
from pathlib import Path

import uvicorn
from uvicorn.config import create_ssl_context

from frontend.http.access.key_files import FollowedFiles

logger = logging.getLogger(__name__)


class TlsRefresh(FollowedFiles):
    """Follows the files of a server's TLS."""

    def __init__(self, config: uvicorn.Config) -> None:
        """
        Args:
            config: loaded, and with TLS.
        """
        self._config = config
        names = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        super().__init__(Path(name) for name in names if name is not None)

    async def changed(self) -> None:
        """Take what is in the files for new connections."""
        try:
            self._load()
        except OSError as error:  # that of TLS is one
            logger.warning("the TLS files have changed and can't be used as yet: %s", error)
        else:
            logger.info("the TLS files have changed: new connections get what is in them")

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
