"""Encodings beyond an engine's encoder cache. No engine runs."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from backend_worker.encodings import (
    check_room,
    kept_tokens,
    names_back,
    refuses,
    take_names,
    without_encoder,
)
from common.errors import ConfigurationError
from common.operations import (
    Operation,
    ReleaseKvCacheMemory,
    ReloadWeights,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
)
from tests.unit.backend_worker.configured import ours

TOKEN = 128 * 4
"""Bytes of a media token's encoding of the demo model in float32."""


def connector(name: str, **extra: object) -> str:
    config = {"ec_connector": name, "ec_role": "ec_both", "ec_connector_extra_config": extra}
    return f"--ec-transfer-config={json.dumps(config)}"


def with_room(tokens: float) -> str:
    return connector("ECCPUConnector", ec_cpu_bytes=int(tokens * TOKEN))


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ((), 2048),
        ((with_room(100_000),), 100_000),
        ((with_room(100.5),), 2048),
        ((connector("ECExampleConnector"),), 1 << 32),
    ],
)
def test_what_is_kept(model: Path, flags: tuple[str, ...], tokens: int) -> None:
    sizes = ["--dtype=float32", "--max-num-batched-tokens=2048"]
    assert kept_tokens(ours([f"--model={model}", *sizes, *flags])) == tokens


def test_a_medium_without_room_would_end_the_engine(model: Path) -> None:
    flags = [f"--model={model}", "--dtype=float32"]
    check_room(ours(flags), 1000)
    check_room(ours([*flags, connector("ECExampleConnector")]), 1000)
    check_room(ours([*flags, with_room(1000)]), 1000)
    for tight in (with_room(999.9), connector("ECCPUConnector")):
        with pytest.raises(ConfigurationError, match=f"ec_cpu_bytes has to be {1000 * TOKEN} at"):
            check_room(ours([*flags, tight]), 1000)


@pytest.mark.parametrize(
    ("operation", "survived"),
    [
        (ReloadWeights(), True),
        (ResetEncoderCache(), True),
        (Sleep(2, "wait"), True),
        (Sleep(1, "wait"), False),
        (ResetMmCache(), False),
        (ResetPrefixCache(), False),
        (ReleaseKvCacheMemory(), False),
    ],
)
def test_other_weights_are_refused(operation: Operation, survived: bool) -> None:
    """Encodings of a connector would survive them."""
    kept: Any = SimpleNamespace(ec_transfer_config=object())
    assert bool(refuses(kept, operation)) == survived
    nothing: Any = SimpleNamespace(ec_transfer_config=None)
    assert refuses(nothing, operation) == ""


def test_no_client_says_where_encodings_are() -> None:
    named = SamplingParams(extra_args={"ec_transfer_params": {"a": {"peer_host": "h"}}, "kept": 1})
    without_encoder(named)
    assert named.extra_args == {"kept": 1}
    without_encoder(SamplingParams())


OPENS = """
import os, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
print("open", flush=True)
sys.stdin.read()
os.unlink(sys.argv[1])
"""
"""An engine: it opens a file by name, and removes the name when it stops."""


@contextlib.contextmanager
def engine(file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OPENS, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def file() -> Iterator[Path]:
    path = Path(f"/dev/shm/vllm_ec_{os.getpid()}{os.urandom(4).hex()}_dp0.mmap")
    yield path
    path.unlink(missing_ok=True)


def test_nothing_is_left_of_an_engine_that_is_killed(file: Path) -> None:
    other = file.with_name(f"{file.stem}.other")
    with engine(file), engine(other):
        assert take_names() == [file]
        assert not file.exists() and other.exists()
    other.unlink()


def test_an_engine_stops_with_its_names(file: Path) -> None:
    with engine(file) as stopping:
        names = take_names()
        with names_back(names):
            _, _ = stopping.communicate()
        assert stopping.returncode == 0
    assert not file.exists()


def test_what_somebody_else_has_there_by_now_stays(file: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    file.symlink_to(theirs)
    with names_back([file]):
        assert theirs.read_text() == "precious"
    assert file.is_symlink() and theirs.read_text() == "precious"
