"""The systemd units: verified where there is systemd, and fit for the product."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backend_worker.args import WorkerArgs
from frontend.args import FrontendArgs
from tests.deployment import DEPLOY, make_keys, parsed, unknown

SYSTEMD = DEPLOY / "systemd"
UNITS = ("mmrouter-frontend.service", "mmrouter-worker@.service")
SPECIFIERS = {"%i": "1", "%l": "host", "%C": "/var/cache", "%%": "%"}

Unit = dict[str, list[str]]


def read(name: str) -> Unit:
    """All assignments of a unit's ``[Service]``."""
    found: Unit = {}
    section = ""
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif line and line[0] not in "#;" and section == "[Service]":
            option, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(option, []).append(value)
    return found


def environment(unit: Unit, credentials: Path) -> dict[str, str]:
    """Of the files first, as systemd would have it otherwise: no variable is in both."""
    found: dict[str, str] = {}
    for path in unit["EnvironmentFile"]:
        for line in (SYSTEMD / Path(path).name).read_text().splitlines():
            if not line.startswith("#"):
                name, _, value = line.partition("=")
                found[name] = value
    assigned = (each for line in unit["Environment"] for each in line.split())
    for name, _, value in (each.partition("=") for each in assigned):
        assert name not in found
        for specifier, meaning in {**SPECIFIERS, "%d": str(credentials)}.items():
            value = value.replace(specifier, meaning)
        found[name] = value
    return found


@pytest.mark.parametrize("name", UNITS)
def test_flags_and_variables_are_understood(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = read(name)
    make_keys(tmp_path / "keys", 0o440)  # credentials are read by an ACL, which shows as the group
    credentials = {each.partition(":")[0] for each in unit["LoadCredential"]}
    variables = environment(unit, tmp_path / "keys")
    assert credentials == {
        Path(value).name for key, value in variables.items() if key.endswith("_KEY_FILE")
    }
    for of_the_unit in ("HOST", "PORT", "ENGINE_ARGS"):
        assert variables.get(of_the_unit, "") == "" or of_the_unit in "".join(unit["ExecStart"])
    assert unknown(variables.keys() - {"HOST", "PORT", "ENGINE_ARGS"}) == []
    (command,) = unit["ExecStart"]
    words = [
        word
        for each in command.split()
        for word in (
            variables[each[1:]].split()
            if re.fullmatch(r"\$\w+", each)
            else [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], each)]
        )
    ]
    assert words[1] == "-m"
    ours = {key: value for key, value in variables.items() if key.startswith("MMROUTER_")}
    match parsed(words[2:], ours, monkeypatch):
        case FrontendArgs() as args:
            assert (args.serve.host, args.serve.port) == ("127.0.0.1", 8000)
            assert args.access.users and args.access.admins
        case WorkerArgs() as args:
            assert args.worker_id == "host-1"
            assert args.engine.max_model_len == 16384
    assert args.process.fleet_key() is not None


@pytest.mark.parametrize("name", UNITS)
def test_a_worker_gets_the_signal_alone_and_has_time(name: str, tmp_path: Path) -> None:
    unit = read(name)
    assert unit["KillMode"] == ["mixed"]
    drain = float(environment(unit, tmp_path)["MMROUTER_DRAIN_TIMEOUT"])
    assert float(unit["TimeoutStopSec"][0]) >= drain + 10


@pytest.mark.parametrize("name", UNITS)
def test_shared_memory_and_cards_are_the_hosts(name: str, tmp_path: Path) -> None:
    unit = read(name)
    assert "PrivateIPC" not in unit and "DynamicUser" not in unit
    assert "RuntimeDirectory" not in unit  # which the first unit that stops would remove
    folder = environment(unit, tmp_path)["MMROUTER_DISCOVERY"].removeprefix("file://")
    assert unit["ReadWritePaths"] == [folder]
    (user,), (group,) = unit["User"], unit["Group"]
    assert f"d {folder} 0700 {user} {group}\n" in (SYSTEMD / "tmpfiles.conf").read_text()
    assert f"\nu {user} - " in (SYSTEMD / "sysusers.conf").read_text()


@pytest.mark.parametrize("name", UNITS)
def test_they_are_shut_in(name: str) -> None:
    unit = read(name)
    assert unit["NoNewPrivileges"] == ["yes"] and unit["CapabilityBoundingSet"] == [""]
    assert unit["ProtectSystem"] == ["strict"]
    assert ("PrivateDevices" in unit) is (name == "mmrouter-frontend.service")  # GPUs


def verify(folder: Path, change: str = "") -> str:
    """What systemd says about copies of the units, with a program that there is."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd here")
    files = []
    for name in UNITS:
        text = (SYSTEMD / name).read_text().replace("/opt/mmrouter/bin/python", sys.executable)
        (folder / name).write_text(text.replace("[Service]\n", f"[Service]\n{change}"))
        files.append(folder / name.replace("@", "@0"))
    (folder / UNITS[1].replace("@", "@0")).write_text((folder / UNITS[1]).read_text())
    command = [analyze, "verify", "--man=no", *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # Of other units on this machine it may have something to say as well.
    return "".join(
        line for line in (result.stdout + result.stderr).splitlines(True) if "mmrouter" in line
    )


def test_systemd_understands_them(tmp_path: Path) -> None:
    assert verify(tmp_path) == ""


@pytest.mark.parametrize(
    ("change", "said"), [("KillModus=mixed\n", "KillModus"), ("TimeoutStopSec=long\n", "long")]
)
def test_systemd_finds_what_is_wrong(tmp_path: Path, change: str, said: str) -> None:
    assert said in verify(tmp_path, change)
