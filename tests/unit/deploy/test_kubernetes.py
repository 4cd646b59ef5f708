"""The manifests: valid by Kubernetes' schemas, and in what no schema knows they fit each other and
the product. No cluster is here, so nothing is applied."""

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from vllm.entrypoints.launchers.app import build_app

from backend_worker.args import WorkerArgs
from common.discovery.settings import BACKENDS, open_discovery
from common.observability import telemetry
from frontend import args as frontend_args
from frontend.args import FrontendArgs
from frontend.http.access.api_keys import OPEN
from frontend.http.operator.app import live_routes, operator_app
from tests.deployment import DEPLOY, Parsed, make_keys, parsed, unknown
from tests.kustomize import Object, render

KUBERNETES = DEPLOY / "kubernetes"
DEPLOYED = ("base", "overlays/etcd", "overlays/monitored")
VERSIONS = ("1.29", kubernetes_validate.latest_version())
SIDES = ("frontend", "worker")


@cache
def _rendered(folder: str) -> list[Object]:
    return render(KUBERNETES / folder)


def rendered(folder: str) -> list[Object]:
    """One's own."""
    return deepcopy(_rendered(folder))


@pytest.fixture(params=DEPLOYED)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(request.param)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def workload(objects: list[Object], side: str) -> Object:
    kind = "Deployment" if side == "frontend" else "StatefulSet"
    return of_kind(objects, kind)[f"mmrouter-{side}"]


def pod(objects: list[Object], side: str) -> Object:
    spec: Object = workload(objects, side)["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object], side: str) -> Object:
    (only,) = pod(objects, side)["containers"]
    assert isinstance(only, dict)
    return only


def environment(objects: list[Object], side: str) -> dict[str, str]:
    """As the container gets it; what the downward API fills in, as it might be."""
    found: dict[str, str] = {}
    for source in container(objects, side)["envFrom"]:
        found |= of_kind(objects, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    filled_in = {
        "metadata.name": "mmrouter-worker-0",
        "metadata.namespace": "mmrouter",
        "metadata.uid": "0",
        "status.podIP": "10.0.0.7",
    }
    for each in container(objects, side)["env"]:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            found[each["name"]] = filled_in[source["fieldRef"]["fieldPath"]]
        else:
            found[each["name"]] = each.get("value", "secret")
    return found


def sources(objects: list[Object], side: str) -> list[dict[str, Any]]:
    (keys,) = (each for each in pod(objects, side)["volumes"] if each["name"] == "keys")
    return [each["secret"] for each in keys["projected"]["sources"]]


def started(
    objects: list[Object], side: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Parsed:
    """What the container's process understands, with keys as they are mounted."""
    (keys,) = (each for each in pod(objects, side)["volumes"] if each["name"] == "keys")
    (mounted,) = (
        each for each in container(objects, side)["volumeMounts"] if each["name"] == "keys"
    )
    make_keys(folder, keys["projected"]["defaultMode"])
    values = {
        name: value.replace(mounted["mountPath"], str(folder))
        for name, value in environment(objects, side).items()
        if name not in ("HOME", "HF_TOKEN")
    }
    if values["MMROUTER_DISCOVERY"].partition(":")[0] not in BACKENDS:
        del values["MMROUTER_DISCOVERY"]
    program, flag, *argv = container(objects, side)["command"]
    assert (program, flag) == ("python", "-m")
    argv += [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each)
        for each in container(objects, side)["args"]
    ]
    return parsed(argv, values, monkeypatch)


# Schemas


def validate(each: Object, version: str) -> None:
    kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_are_valid(version: str) -> None:
    seen: list[Object] = []
    for each in (each for folder in DEPLOYED for each in rendered(folder)):
        # That one is the Prometheus operator's.
        if each["kind"] != "ServiceMonitor" and each not in seen:
            validate(each, version)
            seen.append(each)


def test_the_service_monitor_has_fields_that_there_are() -> None:
    (monitor,) = of_kind(rendered("overlays/monitored"), "ServiceMonitor").values()
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    for endpoint in monitor["spec"]["endpoints"]:
        assert endpoint.keys() <= {"port", "path", "interval"}
        assert endpoint["path"] in OPEN


def _unknown_field(each: Object) -> None:
    each["spec"]["template"]["spec"]["terminationGracePeriod"] = 5


def _wrong_type(each: Object) -> None:
    each["spec"]["replicas"] = "two"


def _missing(each: Object) -> None:
    del each["spec"]["selector"]


def _no_such_choice(each: Object) -> None:
    each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = ["1"]


@pytest.mark.parametrize("break_", [_unknown_field, _wrong_type, _missing, _no_such_choice])
@pytest.mark.parametrize("side", SIDES)
def test_a_broken_manifest_is_refused(side: str, break_: Callable[[Object], None]) -> None:
    each = deepcopy(workload(rendered("base"), side))
    break_(each)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(each, VERSIONS[-1])


def kubectl(*words: str, within: Path = KUBERNETES) -> list[Object]:
    """What it prints as YAML, without a cluster."""
    command = shutil.which("kubectl")
    if command is None:
        pytest.skip("there is no kubectl here")
    done = subprocess.run(
        [command, *words],
        cwd=within,
        env=os.environ | {"KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("folder", DEPLOYED)
def test_kubectl_makes_the_same_of_them(folder: str) -> None:
    assert _by_name(kubectl("kustomize", folder)) == _by_name(rendered(folder))


def test_kubectl_takes_the_commands_that_the_page_has_for_secrets(tmp_path: Path) -> None:
    make_keys(tmp_path, stat.S_IRUSR)
    for name in ("ca.pem", "password"):
        (tmp_path / name).write_text("secret")
    page = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^kubectl (.*\bcreate\b.*)$", page, re.MULTILINE)
    assert len(commands) > 5
    for each in commands:
        words = [*shlex.split(each, comments=True), "--dry-run=client", "--output=yaml"]
        (made,) = kubectl(*words, within=tmp_path)
        validate(made, VERSIONS[-1])


def _by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


# Against the product


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("folder", ["base", "overlays/etcd"])
def test_flags_and_variables_are_understood(
    folder: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered(folder)
    assert unknown(environment(objects, side)) == []
    args = started(objects, side, tmp_path / "keys", monkeypatch)
    assert args.process.fleet_key() is not None  # of a mode that is not refused
    match args:
        case FrontendArgs():
            access = args.access
            assert access.users is not None and access.admins is not None
            assert "user-key" in access.users and "admin-key" in access.admins
            (port,) = container(objects, side)["ports"]
            assert (args.serve.host, args.serve.port) == ("0.0.0.0", port["containerPort"])
        case WorkerArgs():
            assert args.worker_id == "mmrouter-worker-0"
            assert args.worker.endpoint == "tcp://10.0.0.7:5556"


def test_a_variable_that_nobody_reads_is_found_out() -> None:
    assert unknown(["MMROUTER_ARENA_GB", "MMROUTER_MM_ARENA_GB"]) == ["MMROUTER_ARENA_GB"]


@pytest.mark.parametrize("side", SIDES)
def test_a_flag_that_is_none_is_found_out(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered("base")
    container(objects, side)["args"].append("--no-such-flag")
    with pytest.raises(SystemExit):
        started(objects, side, tmp_path / "keys", monkeypatch)


def test_cards_are_where_this_version_looks(objects: list[Object]) -> None:
    (url,) = {environment(objects, side)["MMROUTER_DISCOVERY"] for side in SIDES}
    scheme = url.partition(":")[0]
    if scheme not in BACKENDS:
        pytest.skip(f"there is no discovery {scheme} yet")
    open_discovery(url)


def test_the_keys_of_cards_and_users_are_mounted_where_they_are_looked_for(
    objects: list[Object],
) -> None:
    for side in SIDES:
        files = {item["path"] for secret in sources(objects, side) for item in secret["items"]}
        named = {
            Path(value).name
            for name, value in environment(objects, side).items()
            if name.endswith("_KEY_FILE")
        }
        assert named <= files
        (discovery,) = {environment(objects, side)["MMROUTER_DISCOVERY"]}
        assert set(re.findall(r"/etc/mmrouter/([^&]+)", discovery)) == files - set(named)


def test_the_page_makes_each_secret_that_is_needed(objects: list[Object]) -> None:
    """Names and keys, as the commands in the page make them."""
    page = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    made = {
        (name, key)
        for name, rest in re.findall(r"create secret generic (\S+)(.*)", page)
        for key in re.findall(r"--from-(?:file|literal)=([\w.-]+)=", rest)
    }
    for side in SIDES:
        for secret in sources(objects, side):
            assert {(secret["name"], item["key"]) for item in secret["items"]} <= made
        for each in container(objects, side)["env"]:
            if "secretKeyRef" in (source := each.get("valueFrom", {})):
                reference = source["secretKeyRef"]
                assert (reference["name"], reference["key"]) in made


@pytest.mark.parametrize("side", SIDES)
def test_there_is_time_to_drain(objects: list[Object], side: str) -> None:
    pause = 0
    match container(objects, side).get("lifecycle"):
        case {"preStop": {"exec": {"command": ["sleep", seconds]}}}:
            pause = int(seconds)
    drain = float(environment(objects, side)["MMROUTER_DRAIN_TIMEOUT"])
    rest = 10  # last words of a frontend, the end of an engine
    assert pod(objects, side)["terminationGracePeriodSeconds"] >= pause + drain + rest
    assert pause > 0 or side == "worker"  # a worker says on its card that it leaves


def test_probes_ask_what_there_is_and_need_no_key() -> None:
    objects = rendered("base")
    app = build_app(frontend_args.parse([]).serve, ("generate",))
    own = operator_app([live_routes()], "")
    routes = {getattr(route, "path", None) for route in (*app.routes, *own.routes)}
    frontend = container(objects, "frontend")
    for probe in ("readinessProbe", "livenessProbe"):
        asked = frontend[probe]["httpGet"]
        assert asked["path"] in routes and asked["path"] in OPEN
        assert asked["port"] in {port["name"] for port in frontend["ports"]}
    # Whether there are workers must not decide on life.
    assert frontend["livenessProbe"]["httpGet"]["path"] != "/health"
    worker = container(objects, "worker")
    port = int(environment(objects, "worker")["MMROUTER_WORKER_PORT"])
    for probe in ("startupProbe", "readinessProbe"):
        assert f":{port:04X} " in worker[probe]["exec"]["command"][2]


def test_frontends_wait_for_workers_as_long_as_these_may_take() -> None:
    objects = rendered("base")
    assert "startupProbe" not in container(objects, "frontend"), "it lives while nobody is there"
    probe = container(objects, "worker")["startupProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert workload(objects, "frontend")["spec"]["progressDeadlineSeconds"] > patience


def test_no_service_sets_variables_that_look_like_ours(objects: list[Object]) -> None:
    for side in SIDES:
        assert pod(objects, side)["enableServiceLinks"] is False


def test_the_autoscaler_goes_by_a_metric_that_there_is() -> None:
    gauges = {
        described.name
        for metric in vars(telemetry).values()
        if isinstance(metric, MetricWrapperBase)
        for described in metric.describe()
        if described.type == "gauge"
    }
    objects = rendered("overlays/monitored")
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler").values()
    (ours,) = (each["pods"] for each in scaler["spec"]["metrics"] if each["type"] == "Pods")
    name = ours["metric"]["name"]
    assert name in gauges
    values = yaml.safe_load((KUBERNETES / "prometheus-adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    assert rule["name"]["as"] == name and rule["seriesQuery"].startswith(f"{name}{{")
    # MMROUTER_PROCESSES makes several samples of each Pod; the adapter would take one of them.
    assert rule["metricsQuery"].startswith("sum by (<<.GroupBy>>) (")
    target = scaler["spec"]["scaleTargetRef"]
    scaled = of_kind(objects, target["kind"])[target["name"]]
    assert scaled["apiVersion"] == target["apiVersion"]
    assert "replicas" not in scaled["spec"]  # else each apply would undo it
    requests = container(objects, "frontend")["resources"]["requests"]
    assert "cpu" in requests  # a share of which the other metric is


def test_what_a_frontend_may_hold_fits_into_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered("base")
    args = started(objects, "frontend", tmp_path / "keys", monkeypatch)
    assert isinstance(args, FrontendArgs)
    arena = args.arena.arena_bytes
    held = arena + args.media.cache_bytes
    held += int((args.http.body_memory_mb + args.media.held_mb) * 2**20)
    # Four bytes, and as much again while they are converted.
    held += int(args.media.decoding_megapixels * 1e6 * 8)
    processes = (1 + args.preprocess.workers) * 1.5 * 2**30
    limit = _bytes(container(objects, "frontend")["resources"]["limits"]["memory"])
    assert held + processes <= limit
    (shm,) = (each for each in pod(objects, "frontend")["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert arena < _bytes(shm["emptyDir"]["sizeLimit"])


def _bytes(quantity: str) -> int:
    units = {"Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]


# Among each other


@pytest.mark.parametrize("side", SIDES)
def test_all_that_selects_selects_its_pods(objects: list[Object], side: str) -> None:
    labels = workload(objects, side)["spec"]["template"]["metadata"]["labels"]
    other = "worker" if side == "frontend" else "frontend"
    theirs = workload(objects, other)["spec"]["template"]["metadata"]["labels"]
    service = {"frontend": "mmrouter", "worker": "mmrouter-workers"}[side]
    selectors = [
        workload(objects, side)["spec"]["selector"]["matchLabels"],
        of_kind(objects, "Service")[service]["spec"]["selector"],
        of_kind(objects, "PodDisruptionBudget")[f"mmrouter-{side}"]["spec"]["selector"][
            "matchLabels"
        ],
        of_kind(objects, "NetworkPolicy")[f"mmrouter-{side}"]["spec"]["podSelector"]["matchLabels"],
        *(
            each["labelSelector"]["matchLabels"]
            for each in pod(objects, side)["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= theirs.items()


def test_ports_have_one_number_or_name(objects: list[Object]) -> None:
    for side, service in (("frontend", "mmrouter"), ("worker", "mmrouter-workers")):
        names = {port["name"]: port["containerPort"] for port in container(objects, side)["ports"]}
        for port in of_kind(objects, "Service")[service]["spec"]["ports"]:
            assert port["targetPort"] in names
        let_in = of_kind(objects, "NetworkPolicy")[f"mmrouter-{side}"]["spec"]["ingress"]
        for rule in let_in:
            first = rule["ports"][0]["port"]
            assert first in names or first in names.values()
    worker = environment(objects, "worker")
    (port,) = container(objects, "worker")["ports"]
    assert port["containerPort"] == int(worker["MMROUTER_WORKER_PORT"])
    assert (
        workload(objects, "worker")["spec"]["serviceName"] in of_kind(objects, "Service")
        and of_kind(objects, "Service")["mmrouter-workers"]["spec"]["clusterIP"] == "None"
    )


def test_frontends_reach_the_ports_that_kv_events_are_served_on(objects: list[Object]) -> None:
    (free,) = (
        each["value"]
        for each in pod(objects, "worker")["securityContext"]["sysctls"]
        if each["name"] == "net.ipv4.ip_local_port_range"
    )
    first, last = map(int, free.split())
    policies = of_kind(objects, "NetworkPolicy")
    going_out = policies["mmrouter-frontend"]["spec"]["egress"][0]
    coming_in = policies["mmrouter-worker"]["spec"]["ingress"][0]
    for rule in (going_out, coming_in):
        ports = rule["ports"]
        assert {"port": first, "endPort": last} in ports
        assert {"port": int(environment(objects, "worker")["MMROUTER_WORKER_PORT"])} in ports


def test_pods_meet_the_restricted_standard(objects: list[Object]) -> None:
    (namespace,) = of_kind(objects, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for side in SIDES:
        spec, only = pod(objects, side), container(objects, side)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"emptyDir", "projected"} >= {
            kind for volume in spec["volumes"] for kind in volume if kind != "name"
        }


def test_all_volumes_are_mounted_and_all_mounts_are_volumes(objects: list[Object]) -> None:
    for side in SIDES:
        there = [each["name"] for each in pod(objects, side)["volumes"]]
        claimed = workload(objects, side)["spec"].get("volumeClaimTemplates", [])
        there += [each["metadata"]["name"] for each in claimed]
        mounts = container(objects, side)["volumeMounts"]
        assert sorted(each["name"] for each in mounts) == sorted(there)
        # The rest can't be written to.
        paths = {each["mountPath"] for each in mounts}
        assert {"/tmp", "/dev/shm", environment(objects, side)["HOME"]} <= paths


def test_keys_are_for_the_group_as_which_pods_run(objects: list[Object]) -> None:
    for side in SIDES:
        context = pod(objects, side)["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]
        (keys,) = (each for each in pod(objects, side)["volumes"] if each["name"] == "keys")
        assert keys["projected"]["defaultMode"] == stat.S_IRUSR | stat.S_IRGRP


def test_each_side_may_do_what_it_has_to_and_no_more() -> None:
    objects = rendered("base")
    allowed = {"frontend": {"list"}, "worker": {"create", "patch", "delete", "list"}}
    for side in SIDES:
        account = pod(objects, side)["serviceAccountName"]
        assert account in of_kind(objects, "ServiceAccount")
        (bound,) = (
            each["roleRef"]["name"]
            for each in of_kind(objects, "RoleBinding").values()
            if each["subjects"]
            == [{"kind": "ServiceAccount", "name": account, "namespace": "mmrouter"}]
        )
        (rule,) = of_kind(objects, "Role")[bound]["rules"]
        assert set(rule["verbs"]) == allowed[side]
        assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])


def test_with_etcd_no_pod_has_a_token() -> None:
    objects = rendered("overlays/etcd")
    assert not of_kind(objects, "Role") and not of_kind(objects, "RoleBinding")
    for side in SIDES:
        assert pod(objects, side)["automountServiceAccountToken"] is False


def test_all_is_in_one_namespace(objects: list[Object]) -> None:
    (namespace,) = of_kind(objects, "Namespace")
    elsewhere = [each for each in objects if each["metadata"].get("namespace") != namespace]
    assert [each["kind"] for each in elsewhere] == ["Namespace"]


def test_nothing_holds_a_secret() -> None:
    def kinds(folder: Path) -> Iterator[str]:
        for file in folder.rglob("*.yaml"):
            for each in yaml.safe_load_all(file.read_text()):
                yield each.get("kind", "")

    assert "Secret" not in set(kinds(KUBERNETES))
