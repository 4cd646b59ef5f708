"""Leases as cards: namespace, labels, names and contents. Needs no client."""

import datetime
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from common.errors import ConfigurationError, DiscoveryError
from common.identity import Incarnation, WorkerId

_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DNS: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAMESPACE: Final = re.compile(_DNS)
_KEY: Final = re.compile(rf"(?:(?=[^/]{{1,253}}/){_DNS}(?:\.{_DNS})*/)?{_LABEL}")
_VALUE: Final = re.compile(rf"(?:{_LABEL})?")


@dataclass(frozen=True)
class KubernetesAccess:
    """A kubeconfig and context. By default the Pod's service account, else kubectl's file."""

    kubeconfig: Path | None = None
    context: str | None = None


class Pod(NamedTuple):
    """The Pod in which this process runs."""

    name: str
    uid: str

    @classmethod
    def ours(cls, namespace: str) -> "Pod | None":
        """Read the downward API; None if elsewhere, where an owner would count as deleted."""
        names = ("POD_NAME", "POD_UID", "POD_NAMESPACE")
        name, uid, where = (os.environ.get(each, "") for each in names)
        return cls(name, uid) if name and uid and where == namespace else None


def check_namespace(name: str) -> str:
    """Validate a namespace. Raises ConfigurationError."""
    if "@" in name:  # before it may stand a password
        raise ConfigurationError("no user belongs before a namespace")
    if not _NAMESPACE.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no namespace")
    return name


def labels_of(selector: str) -> dict[str, str]:
    """Return the labels of a selector, which our own Leases carry. Raises ConfigurationError: it is
    malformed, or not of the form LABEL=VALUE."""
    labels: dict[str, str] = {}
    for term in selector.split(","):
        key, equals, value = term.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ConfigurationError(f"{term!r} is no LABEL=VALUE")
        if key in labels:
            raise ConfigurationError(f"it has the label {key!r} twice")
        labels[key] = value
    return labels


CARD: Final = "mmrouter/card"
WORKER: Final = "mmrouter/worker"  # annotations

LEASE_S: Final = 10.0  # a card whose Lease was not renewed for this long is void

MAX_ID_LEN: Final = 128

_INCARNATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PREFIX: Final = "mmrouter-"


class Metadata(msgspec.Struct, rename="camel"):
    """Fields of an object's metadata that we read."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class Spec(msgspec.Struct, rename="camel"):
    """Fields of a Lease that we read."""

    holder_identity: str | None = None


class Lease(msgspec.Struct, rename="camel"):
    """A Lease, as the API server returns it."""

    metadata: Metadata
    spec: Spec | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def card(self) -> bytes:
        """Unvalidated content of the card annotation."""
        return (self.metadata.annotations or {}).get(CARD, "").encode()

    def whose(self) -> tuple[WorkerId, Incarnation] | None:
        """Return the worker and incarnation of a card; None if it is not named like one."""
        worker = (self.metadata.annotations or {}).get(WORKER, "")
        holder = "" if self.spec is None else self.spec.holder_identity or ""
        if not _is_named(worker, holder):
            return None
        worker_id, incarnation = WorkerId(worker), Incarnation(holder)
        return (worker_id, incarnation) if self.name == name_of(worker_id, incarnation) else None


class ListMetadata(msgspec.Struct, rename="camel"):
    """Fields of a list's metadata that we read."""

    next_page: str = msgspec.field(default="", name="continue")


class LeaseList(msgspec.Struct, rename="camel"):
    metadata: ListMetadata
    items: list[Lease] | None = None


class Status(msgspec.Struct):
    """Answer of the API server without an object."""

    code: int = 0
    message: str = ""


def name_of(worker_id: WorkerId, incarnation: Incarnation) -> str:
    """Return the name of a Lease, a hash: object names allow fewer characters than worker ids."""
    digest = hashlib.sha256(f"{worker_id}\0{incarnation}".encode()).hexdigest()
    return _PREFIX + digest[:40]


def check_names(worker_id: WorkerId, incarnation: Incarnation) -> None:
    """Raise DiscoveryError if no Lease can have these names."""
    if not _is_named(worker_id, incarnation):
        raise DiscoveryError(
            f"worker id {worker_id!r} can't stand on a Lease: "
            f"use at most {MAX_ID_LEN} printable characters"
        )


def _is_named(worker_id: str, incarnation: str) -> bool:
    printable = 0 < len(worker_id) <= MAX_ID_LEN and worker_id.isprintable()
    return printable and _INCARNATION.fullmatch(incarnation) is not None


def now() -> str:
    """Return the current time in a Lease's format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def whole(
    worker_id: WorkerId,
    incarnation: Incarnation,
    content: bytes,
    *,
    labels: dict[str, str],
    pod: Pod | None,
) -> dict[str, object]:
    """Return a complete Lease, renewed now."""
    metadata: dict[str, object] = {
        "name": name_of(worker_id, incarnation),
        "labels": labels,
        "annotations": {CARD: content.decode(), WORKER: worker_id},
    }
    if pod is not None:  # with which Kubernetes removes the Lease
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": incarnation,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": now(),
        },
    }


def renewal(version: str) -> dict[str, object]:
    """Return a patch that renews a Lease, unless it has changed since a version."""
    return {"metadata": {"resourceVersion": version}, "spec": {"renewTime": now()}}
