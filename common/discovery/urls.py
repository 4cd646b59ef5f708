"""Discovery is opened by URL; its scheme says which kind it is."""

from typing import Final
from urllib.parse import urlsplit

from common.cli.settings_summary import without_secrets
from common.discovery.base import Discovery
from common.discovery.etcd import EtcdDiscovery
from common.discovery.file import FileDiscovery
from common.discovery.kubernetes import KubernetesDiscovery
from common.errors import ConfigurationError

BACKENDS: Final[dict[str, type[Discovery]]] = {
    "file": FileDiscovery,
    "etcd": EtcdDiscovery,
    "kubernetes": KubernetesDiscovery,
}
"""Every kind of discovery, by the scheme of its URLs."""


def open_discovery(url: str) -> Discovery:
    """The place that a URL names. Nothing is touched yet.

    Raises:
        ConfigurationError: the scheme is unknown, or the rest means nothing to its backend.
    """
    forms = " or ".join(backend.form for backend in BACKENDS.values())
    try:
        parts = urlsplit(url)
        backend = BACKENDS.get(parts.scheme)
        if backend is None:
            raise ConfigurationError(f"no discovery has the scheme {parts.scheme!r}")
        return backend.from_url(parts)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(
            f"discovery can't be at {without_secrets(url)!r}, it must be at {forms}: {error}"
        ) from error
