"""What an API server of Kubernetes does with Lease objects, in memory.

Each rule is of the documentation of Kubernetes, in the section that it names. It was compared once
with kube-apiserver 1.20.2: `tests/unit/common/discovery/kubernetes/test_api_server.py` says how.
"""

import copy
import json
import re
import uuid
from typing import Any, Final, NamedTuple

Object = dict[str, Any]

GROUP: Final = "coordination.k8s.io"

_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_MICRO_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")

MAX_ANNOTATIONS: Final = 256 << 10
"""Bytes of all annotations of one object."""


class RefusalError(Exception):
    """A Status object ("Response status", API conventions)."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        self.code = code


class Change(NamedTuple):
    """One entry of the history that pages are served from."""

    version: int
    namespace: str
    before: Object | None
    after: Object | None


class LeaseStore:
    """All Leases of a cluster."""

    def __init__(self, *namespaces: str) -> None:
        self.namespaces = set(namespaces)
        self.version = 100
        self.oldest = 100
        self.history: list[Change] = []
        self._leases: dict[tuple[str, str], Object] = {}

    def create(self, namespace: str, wanted: Object) -> Object:
        # "Namespaces": nothing is made in one that is not there.
        if namespace not in self.namespaces:
            raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
        lease = copy.deepcopy(wanted)
        name = lease.get("metadata", {}).get("name", "")
        _check(name, lease)
        if (namespace, name) in self._leases:
            raise RefusalError(409, "AlreadyExists", f'leases.{GROUP} "{name}" already exists')
        meta = lease["metadata"]
        meta |= {"namespace": namespace, "uid": str(uuid.uuid4())}
        meta["creationTimestamp"] = "2026-01-01T00:00:00Z"
        return self._put(namespace, name, lease)

    def patch(self, namespace: str, name: str, change: Object) -> Object:
        """A JSON merge patch (RFC 7386; "Update API Objects in Place Using kubectl patch")."""
        before = self._get(namespace, name)
        wanted_version = change.get("metadata", {}).get("resourceVersion")
        # "Resource versions": one that is given must be the object's.
        if wanted_version not in (None, "", before["metadata"]["resourceVersion"]):
            raise RefusalError(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on leases.{GROUP} "{name}": the object has been '
                "modified; please apply your changes to the latest version and try again",
            )
        after = _merged(before, change)
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        _check(name, after)
        if after == before:  # "no-op" writes are not stored
            return before
        return self._put(namespace, name, after)

    def delete(self, namespace: str, name: str, preconditions: Object | None = None) -> Object:
        """With "Preconditions" of DeleteOptions."""
        before = self._get(namespace, name)
        for key, value in (preconditions or {}).items():
            if before["metadata"].get(key) != value:
                raise RefusalError(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on leases.{GROUP} "{name}": '
                    f"Precondition failed: {key} in precondition: {value}, "
                    f"{key} in object meta: {before['metadata'].get(key)}",
                )
        del self._leases[namespace, name]
        self.version += 1
        after = copy.deepcopy(before)
        after["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, namespace, after, None))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def page(self, namespace: str, selector: str, limit: int, token: str) -> Object:
        """ "Retrieving large results sets in chunks": all pages are of one version."""
        version, after = self.version, ""
        if token:
            version, after = json.loads(token)
            if version < self.oldest:
                raise RefusalError(
                    410,
                    "Expired",
                    "The provided continue parameter is too old to display a consistent list "
                    "result. You can start a new list without the continue parameter.",
                )
        found = [
            lease
            for name, lease in sorted(self._at(namespace, version).items())
            if name > after and matches(lease, selector)
        ]
        page = found[:limit] if limit else found
        meta: Object = {"resourceVersion": str(version)}
        if len(page) < len(found):
            meta["continue"] = json.dumps([version, page[-1]["metadata"]["name"]])
            meta["remainingItemCount"] = len(found) - len(page)
        return {
            "kind": "LeaseList",
            "apiVersion": f"{GROUP}/v1",
            "metadata": meta,
            "items": page,
        }

    def compact(self) -> None:
        """Forget the history, as etcd does by itself after some minutes."""
        self.version += 1
        self.oldest = self.version
        self.history = [each for each in self.history if each.version >= self.oldest]

    def names(self, namespace: str) -> list[str]:
        return [name for where, name in self._leases if where == namespace]

    def _at(self, namespace: str, version: int) -> dict[str, Object]:
        """What was there at a version that is still known."""
        then = {name: lease for (where, name), lease in self._leases.items() if where == namespace}
        for change in reversed(self.history):
            if change.version <= version:
                break
            if change.namespace != namespace:
                continue
            name = (change.after or change.before or {})["metadata"]["name"]
            if change.before is None:
                then.pop(name, None)
            else:
                then[name] = change.before
        return then

    def _get(self, namespace: str, name: str) -> Object:
        try:
            return self._leases[namespace, name]
        except KeyError:
            raise RefusalError(404, "NotFound", f'leases.{GROUP} "{name}" not found') from None

    def _put(self, namespace: str, name: str, lease: Object) -> Object:
        self.version += 1
        lease |= {"kind": "Lease", "apiVersion": f"{GROUP}/v1"}
        lease["metadata"]["resourceVersion"] = str(self.version)
        before = self._leases.get((namespace, name))
        self._leases[namespace, name] = lease
        self.history.append(Change(self.version, namespace, before, lease))
        return lease


def matches(lease: Object, selector: str) -> bool:
    """ "Labels and selectors", equality-based only."""
    labels = lease["metadata"].get("labels") or {}
    terms = [term.partition("=") for term in selector.split(",") if term]
    return all(labels.get(key) == value for key, _, value in terms)


def _merged(target: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _check(name: str, lease: Object) -> None:
    """ "Object names and IDs", "Labels and selectors", "Annotations", and the Lease's own rules."""
    meta, spec = lease.get("metadata") or {}, lease.get("spec") or {}
    for time in ("renewTime", "acquireTime"):
        if time in spec and not _MICRO_TIME.fullmatch(spec[time]):
            raise RefusalError(400, "BadRequest", f'parsing time "{spec[time]}" as RFC3339')
    wrong = []
    if meta.get("name") != name or not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
        wrong.append(f'metadata.name: Invalid value: "{name}"')
    for key, value in (meta.get("labels") or {}).items():
        if len(value) > 63 or not _LABEL.fullmatch(value):
            wrong.append(f'metadata.labels: Invalid value: "{value}"')
        if not key or len(key.rpartition("/")[2]) > 63:
            wrong.append(f'metadata.labels: Invalid value: "{key}"')
    annotations = meta.get("annotations") or {}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATIONS:
        wrong.append(f"metadata.annotations: Too long: must have at most {MAX_ANNOTATIONS} bytes")
    if spec.get("leaseDurationSeconds", 1) <= 0:
        wrong.append("spec.leaseDurationSeconds: Invalid value: must be greater than 0")
    if wrong:
        said = wrong[0] if len(wrong) == 1 else f"[{', '.join(wrong)}]"
        raise RefusalError(422, "Invalid", f'Lease.{GROUP} "{name}" is invalid: {said}')
