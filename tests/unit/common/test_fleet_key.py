import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigurationError
from common.fleet_key import FleetKey, new


@pytest.fixture
def path(tmp_path: Path) -> Path:
    new(tmp_path / "key")
    return tmp_path / "key"


def test_a_new_key_is_for_its_owner_alone_and_reads_the_same_every_time(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert FleetKey.read(path) == FleetKey.read(path)


def test_every_key_is_another_and_so_is_its_fingerprint(tmp_path: Path, path: Path) -> None:
    new(tmp_path / "other")
    one, other = FleetKey.read(path), FleetKey.read(tmp_path / "other")
    assert one.fingerprint != other.fingerprint
    secrets = {k.secret for key in (one, other) for k in (key.worker, key.frontend)}
    assert len(secrets) == 4


def test_no_secret_is_shown(path: Path) -> None:
    key = FleetKey.read(path)
    shown = repr(key) + key.fingerprint
    assert key.worker.secret.decode() not in shown
    assert key.frontend.secret.decode() not in shown
    assert path.read_text().splitlines()[-1] not in shown


def test_a_key_is_never_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="exists"):
        new(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666, 0o644])
def test_a_key_that_others_can_read_or_change_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        FleetKey.read(path)


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"abc", b"ff" * 31, b"g" * 64, b"\xff"])
def test_what_is_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError) as caught:
        FleetKey.read(path)
    assert caught.value.__cause__ is None or content == b"\xff"
    assert not content.strip() or content.decode(errors="replace") not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        FleetKey.read(tmp_path / "nowhere")


def test_the_command_makes_a_key_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "common.fleet_key", "new", str(tmp_path / "key")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == 0 and "--fleet-key-file" in first.stdout
    FleetKey.read(tmp_path / "key")
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1 and "Traceback" not in again.stderr
