"""Leases as cards: their namespace and labels, what they are called and what stands in them.

Needs no client.
"""

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
    """A file that says where the API server is, and its context; without, the service account of
    this Pod, else the file that kubectl would take."""

    kubeconfig: Path | None = None
    context: str | None = None


class Pod(NamedTuple):
    """The Pod in which we run."""

    name: str
    uid: str

    @classmethod
    def ours(cls, namespace: str) -> "Pod | None":
        """As the downward API says it; None unless it is in this namespace, since an owner
        elsewhere counts as one that is gone."""
        names = ("POD_NAME", "POD_UID", "POD_NAMESPACE")
        name, uid, where = (os.environ.get(each, "") for each in names)
        return cls(name, uid) if name and uid and where == namespace else None


def check_namespace(name: str) -> str:
    """Raises ConfigurationError."""
    if "@" in name:  # before it may stand a password
        raise ConfigurationError("no user belongs before a namespace")
    if not _NAMESPACE.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no namespace")
    return name


def labels_of(selector: str) -> dict[str, str]:
    """The labels that a selector asks for, and that our own Leases have for that reason.

    Raises ConfigurationError: it is none, or one that labels can't be made from.
    """
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

LONGEST_ID: Final = 128

_INCARNATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PREFIX: Final = "mmrouter-"


class Metadata(msgspec.Struct, rename="camel"):
    """What we read of an object's metadata."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class Spec(msgspec.Struct, rename="camel"):
    """What we read of a Lease."""

    holder_identity: str | None = None


class Lease(msgspec.Struct, rename="camel"):
    """A Lease, as the API server gives it."""

    metadata: Metadata
    spec: Spec | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def card(self) -> bytes:
        """Whatever stands where a card should."""
        return (self.metadata.annotations or {}).get(CARD, "").encode()

    def whose(self) -> tuple[WorkerId, Incarnation] | None:
        """Whose card this is; None if it is not named as one."""
        worker = (self.metadata.annotations or {}).get(WORKER, "")
        holder = "" if self.spec is None else self.spec.holder_identity or ""
        if not _is_named(worker, holder):
            return None
        worker_id, incarnation = WorkerId(worker), Incarnation(holder)
        return (worker_id, incarnation) if self.name == name_of(worker_id, incarnation) else None


class ListMetadata(msgspec.Struct, rename="camel"):
    """What we read of a list's metadata."""

    next_page: str = msgspec.field(default="", name="continue")


class LeaseList(msgspec.Struct, rename="camel"):
    """A page of Leases."""

    metadata: ListMetadata
    items: list[Lease] | None = None


class Status(msgspec.Struct):
    """What the API server says when it has no object to give."""

    code: int = 0
    message: str = ""


def name_of(worker_id: WorkerId, incarnation: Incarnation) -> str:
    """The name of an object, which may have far less in it than a worker's id."""
    digest = hashlib.sha256(f"{worker_id}\0{incarnation}".encode()).hexdigest()
    return _PREFIX + digest[:40]


def check_names(worker_id: WorkerId, incarnation: Incarnation) -> None:
    """Raises DiscoveryError: no Lease can be for these."""
    if not _is_named(worker_id, incarnation):
        raise DiscoveryError(
            f"worker id {worker_id!r} can't stand on a Lease: "
            f"use at most {LONGEST_ID} printable characters"
        )


def _is_named(worker_id: str, incarnation: str) -> bool:
    printable = 0 < len(worker_id) <= LONGEST_ID and worker_id.isprintable()
    return printable and _INCARNATION.fullmatch(incarnation) is not None


def now() -> str:
    """As a Lease has it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def whole(
    worker_id: WorkerId,
    incarnation: Incarnation,
    content: bytes,
    *,
    labels: dict[str, str],
    pod: Pod | None,
) -> dict[str, object]:
    """All of a Lease, renewed now."""
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
    """A patch that renews a Lease if nobody else has changed it since a version."""
    return {"metadata": {"resourceVersion": version}, "spec": {"renewTime": now()}}
