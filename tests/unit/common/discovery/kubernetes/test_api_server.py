"""The API server that other tests use does what a real one does.

With ``MMROUTER_TEST_KUBECONFIG`` naming a kubeconfig (whose user has a token, and may do everything
with Leases in the namespace ``fleet``), the same is asked of a real one. Tried with kube-apiserver
1.20.2 and etcd 3.5.1.
"""

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.fakes.kubernetes import api_server

LEASES = "/apis/coordination.k8s.io/v1/namespaces/fleet/leases"
TIME = "2026-01-01T00:00:00.{:06}Z"
OURS = "mmrouter-test=api"


class Caller:
    """Asks an API server for something."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._where = urlsplit(cluster["server"])
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._token = config["users"][0]["user"]["token"]

    def __call__(
        self, verb: str, path: str = LEASES, body: object = None, **options: str | None
    ) -> tuple[int, Any]:
        status, content = self.raw(verb, path, body, **options)
        return status, json.loads(content)

    def raw(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        token: str | None = "",
        kind: str | None = "application/merge-patch+json",
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": str(kind if verb == "PATCH" else "application/json")}
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self._token}"
        link = http.client.HTTPSConnection(
            str(self._where.hostname), self._where.port, context=self._tls, timeout=30
        )
        try:
            link.request(verb, path, None if body is None else json.dumps(body), headers)
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if real := os.environ.get("MMROUTER_TEST_KUBECONFIG"):
        yield Path(real)
        return
    with api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server.kubeconfig()


@pytest.fixture
def call(kubeconfig: Path) -> Iterator[Caller]:
    caller = Caller(kubeconfig)
    yield caller
    for lease in caller("GET", f"{LEASES}?labelSelector={quote(OURS)}")[1]["items"]:
        caller("DELETE", f"{LEASES}/{lease['metadata']['name']}")


def lease(name: str, **metadata: object) -> dict[str, Any]:
    key, _, value = OURS.partition("=")
    return {
        "metadata": {"name": name, "labels": {key: value}} | metadata,
        "spec": {"holderIdentity": "i0", "leaseDurationSeconds": 10, "renewTime": TIME.format(0)},
    }


def test_who_may_do_what(call: Caller) -> None:
    status, said = call("GET", token="wrong")
    assert (status, said["reason"], said["message"]) == (401, "Unauthorized", "Unauthorized")
    status, said = call("GET", token=None)
    assert (status, said["reason"]) == (403, "Forbidden")
    assert said["message"] == (
        'leases.coordination.k8s.io is forbidden: User "system:anonymous" cannot list resource '
        '"leases" in API group "coordination.k8s.io" in the namespace "fleet"'
    )


def test_a_lease_is_made_once(call: Caller) -> None:
    status, made = call("POST", LEASES, lease("a"))
    assert status == 201 and made["kind"] == "Lease"
    assert made["metadata"]["uid"] and made["metadata"]["resourceVersion"]
    status, said = call("POST", LEASES, lease("a"))
    assert (status, said["reason"]) == (409, "AlreadyExists")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (lease("A_b"), 422),
        (lease("x" * 254), 422),
        (lease("a", labels={"a": "b c"}), 422),
        (lease("a", labels={"a": "x" * 64}), 422),
        (lease("a", labels={"x" * 64: "a"}), 422),
        (lease("a", annotations={"mmrouter/card": "x" * (256 << 10)}), 422),
        (lease("a") | {"spec": {"leaseDurationSeconds": 0}}, 422),
        (lease("a") | {"spec": {"renewTime": "2026-01-01T00:00:00Z"}}, 400),
        (lease("a") | {"spec": {"renewTime": "now"}}, 400),
    ],
)
def test_what_is_not_valid_is_refused(call: Caller, wrong: object, status: int) -> None:
    assert call("POST", LEASES, wrong)[0] == status


def test_annotations_may_have_so_much_and_no_more(call: Caller) -> None:
    key = "mmrouter/card"
    full = lease("a", annotations={key: "x" * ((256 << 10) - len(key))})
    assert call("POST", LEASES, full)[0] == 201


def test_a_patch_needs_the_version_that_it_names(call: Caller) -> None:
    assert call("PATCH", f"{LEASES}/a", {"spec": {}})[0] == 404
    version = call("POST", LEASES, lease("a"))[1]["metadata"]["resourceVersion"]
    patch = {"spec": {"renewTime": TIME.format(1)}}
    status, changed = call(
        "PATCH", f"{LEASES}/a", {"metadata": {"resourceVersion": version}, **patch}
    )
    assert status == 200 and changed["spec"]["renewTime"] == TIME.format(1)
    assert changed["spec"]["holderIdentity"] == "i0"
    newer = changed["metadata"]["resourceVersion"]
    assert newer != version
    # What changes nothing is no new version.
    assert call("PATCH", f"{LEASES}/a", patch)[1]["metadata"]["resourceVersion"] == newer
    old = {"metadata": {"resourceVersion": version}, "spec": {"renewTime": TIME.format(2)}}
    status, said = call("PATCH", f"{LEASES}/a", old)
    assert (status, said["reason"]) == (409, "Conflict")
    assert call("PATCH", f"{LEASES}/a", patch, kind="application/odd")[0] == 415


def test_a_deletion_may_have_conditions(call: Caller) -> None:
    call("POST", LEASES, lease("a"))
    status, said = call("DELETE", f"{LEASES}/a", {"preconditions": {"resourceVersion": "1"}})
    assert (status, said["reason"]) == (409, "Conflict")
    assert call("DELETE", f"{LEASES}/a")[0] == 200
    status, said = call("DELETE", f"{LEASES}/a")
    assert (status, said["reason"]) == (404, "NotFound")


def test_pages_are_of_one_version(call: Caller) -> None:
    for name in "abc":
        call("POST", LEASES, lease(name))
    found, after, versions = [], "", set()
    while True:
        query = f"labelSelector={quote(OURS)}&limit=1&continue={quote(after)}"
        status, page = call("GET", f"{LEASES}?{query}")
        assert status == 200 and len(page["items"]) <= 1, "the last one may be empty"
        found += [each["metadata"]["name"] for each in page["items"]]
        versions.add(page["metadata"]["resourceVersion"])
        if found == ["a"]:
            call("POST", LEASES, lease("d"))  # too late for this list
        after = page["metadata"].get("continue", "")
        if not after:
            break
    assert found == ["a", "b", "c"] and len(versions) == 1
