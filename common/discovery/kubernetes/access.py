"""Find the API server and its credentials, by the official client."""

import asyncio
import os
from pathlib import Path
from typing import Final

import yaml
from kubernetes_asyncio import config
from kubernetes_asyncio.client import Configuration

from common.discovery.kubernetes.leases import KubernetesAccess
from common.errors import DiscoveryError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts the token of a Pod, and the certificate of its API server's authority."""

_ODD: Final = (
    config.ConfigException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)
"""What the client says of a file that makes no sense."""

CREDENTIALS_S: Final = 15.0
"""How long a program that a kubeconfig names may take to get credentials."""


def configured(access: KubernetesAccess) -> Configuration:
    """Read the credentials. Blocks: may run a program. Raises DiscoveryError."""
    found = Configuration()
    # Many clusters' certificates lack an extension that Python 3.13 requires. The authority and the
    # host name are checked all the same.
    found.disable_strict_ssl_verification = True
    try:
        if access.kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            source = "the service account of this Pod"
            config.load_incluster_config(
                client_configuration=found,
                token_filename=str(SERVICE_ACCOUNT / "token"),
                cert_filename=str(SERVICE_ACCOUNT / "ca.crt"),
            )
        else:
            files = _kubeconfig(access)
            source = f"kubeconfig {files}"
            asyncio.run(_load(files, access.context, found))
    except DiscoveryError:
        raise
    except _ODD as error:
        # Text behind a brace quotes the file, and may be a secret.
        said = str(error).partition("{")[0].strip() or type(error).__name__
        raise DiscoveryError(f"{source} can't be used: {' '.join(said.split())}") from None
    return found


def _kubeconfig(access: KubernetesAccess) -> str:
    """Return file names in the format of ``KUBECONFIG``, at least one of which exists."""
    if access.kubeconfig is not None:
        names = str(access.kubeconfig)
        each = [names]
    else:
        names = os.environ.get("KUBECONFIG") or "~/.kube/config"
        each = [name for name in names.split(":") if name]
    if not any(Path(name).expanduser().exists() for name in each):
        raise DiscoveryError(
            f"kubeconfig {names} is not there"
            + ("" if access.kubeconfig else ", and this is no Pod with a service account")
        )
    return names


async def _load(files: str, context: str | None, found: Configuration) -> None:
    async with asyncio.timeout(CREDENTIALS_S):
        await config.load_kube_config(
            config_file=files, context=context, client_configuration=found, persist_config=False
        )
