"""The compose file: valid by the schema of its specification, and fit for the product."""

import importlib.resources
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from backend_worker.args import WorkerArgs
from common.discovery import file as file_discovery
from frontend.args import FrontendArgs
from tests.deployment import DEPLOY, make_keys, parsed, unknown

Service = dict[str, Any]


@pytest.fixture
def compose() -> Service:
    loaded: Service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


@cache
def schema() -> Draft202012Validator:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return Draft202012Validator(json.loads((schemas / "compose-spec.json").read_text()))


def validate(compose: Service) -> None:
    schema().validate(compose)


def test_it_is_valid(compose: Service) -> None:
    validate(compose)


@pytest.mark.parametrize(
    ("field", "value"),
    [("cap_dropped", ["ALL"]), ("stop_grace_period", 90), ("secrets", "fleet.key"), ("image", 1)],
)
def test_a_broken_one_is_refused(compose: Service, field: str, value: object) -> None:
    compose["services"]["frontend"][field] = value
    with pytest.raises(ValidationError):
        validate(compose)


@pytest.mark.parametrize("name", ["frontend", "worker-0", "worker-1"])
def test_flags_and_variables_are_understood(
    compose: Service, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = compose["services"][name]
    assert unknown(service["environment"]) == []
    make_keys(tmp_path / "keys", 0o600)
    environment = {
        variable: value.replace("/run/secrets", str(tmp_path / "keys"))
        for variable, value in service["environment"].items()
        if variable.startswith("MMROUTER_")
    }
    argv = list(service["command"])
    if name != "frontend":
        *_, script, itself = service["entrypoint"]
        program = re.fullmatch(r'exec python -m (\S+) (.*) "\$\$@"', script)
        assert program and itself == "worker"
        flags = program[2].replace('"$$(hostname -i)"', "172.18.0.3").split()
        argv = [program[1], *flags, re.sub(r"\$\{\w+:-(.*)\}", r"\1", argv[0])]
    args = parsed(argv, environment, monkeypatch)
    assert args.process.fleet_key() is not None
    assert isinstance(args.discovery, file_discovery.FileDiscovery)
    match args:
        case FrontendArgs():
            (published,) = service["ports"]
            assert published.rpartition(":")[2] == str(args.serve.port)
            shm = compose["volumes"]["shm"]["driver_opts"]["o"]
            assert args.arena.arena_bytes < int(re.findall(r"size=(\d+)g", shm)[0]) << 30
        case WorkerArgs():
            assert args.worker_id == name
            assert args.worker.endpoint == "tcp://172.18.0.3:5556"
            assert f":{5556:04X} " in service["healthcheck"]["test"][3]


def test_all_can_share_memory_and_cards(compose: Service) -> None:
    """One ``/dev/shm``, one place for cards, and one user, as whom both are made."""
    services = compose["services"].values()
    assert all({"shm:/dev/shm", "cards:/run/mmrouter"} <= set(each["volumes"]) for each in services)
    (user,) = {each["user"] for each in services}
    options = compose["volumes"]["cards"]["driver_opts"]["o"].split(",")
    assert {
        "mode=0700",
        *(f"{k}={v}" for k, v in zip(("uid", "gid"), user.split(":"), strict=True)),
    } <= set(options)
    (discovery,) = {each["environment"]["MMROUTER_DISCOVERY"] for each in services}
    assert discovery == "file:///run/mmrouter"


def test_there_is_time_to_drain(compose: Service) -> None:
    for each in compose["services"].values():
        drain = float(each["environment"]["MMROUTER_DRAIN_TIMEOUT"])
        assert int(each["stop_grace_period"].removesuffix("s")) >= drain + 10


def test_secrets_are_those_that_the_page_makes(compose: Service) -> None:
    page = (DEPLOY / "README.md").read_text()
    for name, secret in compose["secrets"].items():
        assert secret["file"] == f"./keys/{name}" and name in page
    for each in compose["services"].values():
        assert set(each["secrets"]) <= compose["secrets"].keys()
        named = {
            Path(value).name
            for variable, value in each["environment"].items()
            if variable.endswith("_KEY_FILE")
        }
        assert named == set(each["secrets"])


def test_each_worker_has_a_gpu_and_a_name_of_its_own(compose: Service) -> None:
    workers = [each for name, each in compose["services"].items() if name != "frontend"]
    ids = [each["environment"]["MMROUTER_WORKER_ID"] for each in workers]
    gpus = [
        tuple(each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"])
        for each in workers
    ]
    assert len(set(ids)) == len(set(gpus)) == len(workers) == 2


def test_no_service_has_more_rights_than_it_needs(compose: Service) -> None:
    for each in compose["services"].values():
        assert each["read_only"] is True and each["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in each["security_opt"]
        assert not each.keys() & {"privileged", "network_mode", "ipc", "pid"}
