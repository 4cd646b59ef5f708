"""Leases in a namespace as a place for cards."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import SplitResult, unquote

from common.discovery.base import CardPublisher, CardWatcher, Discovery, options_of
from common.discovery.kubernetes.leases import KubernetesAccess, Pod, check_namespace, labels_of
from common.discovery.watcher import PollingWatcher
from common.errors import ConfigurationError
from common.fleet_key import FleetKey

RENEW_S: Final = 2.0
"""A Lease is renewed less often than what lies elsewhere: each renewal is written to the cluster's
own store."""

_OPTIONS: Final = ("kubeconfig", "context")


@dataclass(frozen=True)
class KubernetesDiscovery(Discovery):
    form: ClassVar[str] = "kubernetes://namespace/label=value"

    namespace: str
    labels: dict[str, str]
    access: KubernetesAccess = field(default_factory=KubernetesAccess)

    @classmethod
    def from_url(cls, url: SplitResult) -> "KubernetesDiscovery":
        if find_spec("kubernetes_asyncio") is None:
            raise ConfigurationError(
                "the Python package kubernetes-asyncio is missing: pip install kubernetes-asyncio"
            )
        namespace = check_namespace(url.netloc)
        if url.fragment:
            raise ConfigurationError("a selector has no '#'")
        labels = labels_of(unquote(url.path, errors="strict").removeprefix("/"))
        options = options_of(url, _OPTIONS)
        file = options.get("kubeconfig")
        access = KubernetesAccess(None if file is None else Path(file), options.get("context"))
        return cls(namespace, labels, access)

    def __str__(self) -> str:
        return f"kubernetes://{self.namespace}/{self.selector}"

    @property
    def selector(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.labels.items())

    # Imported late: the client is large, and other backends don't need it.

    def publisher(self, key: FleetKey | None = None, *, renew_s: float = RENEW_S) -> CardPublisher:
        from common.discovery.kubernetes.client import LeaseClient
        from common.discovery.kubernetes.publisher import KubernetesCardPublisher

        client = LeaseClient(self.access, self.namespace, self.selector)
        pod = Pod.ours(self.namespace)
        return KubernetesCardPublisher(client, self.labels, key, pod, renew_s=renew_s)

    def watcher(self, key: FleetKey | None = None) -> CardWatcher:
        from common.discovery.kubernetes.client import CardLeases, LeaseClient

        client = LeaseClient(self.access, self.namespace, self.selector)
        return PollingWatcher(CardLeases(client), key)
