"""A place for cards that is of no use ends a process at its start: one sentence, status 2."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import backend_worker.worker
import frontend.__main__

WORKER, FRONTEND = "worker", "frontend"
RUN: dict[str, Callable[[], None]] = {
    WORKER: backend_worker.worker.run,
    FRONTEND: frontend.__main__.main,
}
FLAGS = {WORKER: ["--model=m"], FRONTEND: ["--mm-arena-gb=0", "--port=0"]}


@pytest.fixture(autouse=True)
def nothing_of_the_process_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_worker.worker, "configure_logging", lambda *_: None)
    monkeypatch.setattr(frontend.__main__, "configure_logging", lambda *_: None)
    monkeypatch.setattr(frontend.__main__, "raise_file_limit", lambda _: None)
    for name in ("VLLM_HOST_IP", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "VLLM_MEDIA_CONNECTOR"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes afterwards
        monkeypatch.delenv(name)


def ended(
    process: str, discovery: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[object, list[str]]:
    """With which status, and what was said."""
    monkeypatch.setattr(sys, "argv", [process, *FLAGS[process], f"--discovery={discovery}"])
    with caplog.at_level("ERROR"), pytest.raises(SystemExit) as caught:
        RUN[process]()
    return caught.value.code, [each.getMessage() for each in caplog.records]


@pytest.mark.parametrize("process", RUN)
def test_no_etcd_there(
    process: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, said = ended(process, "etcd://127.0.0.1:1/fleet", monkeypatch, caplog)
    assert status == 2
    assert len(said) == 1 and "etcd at 127.0.0.1:1 can't be used" in said[0]


@pytest.mark.parametrize("process", RUN)
def test_a_directory_that_others_may_write_to(
    process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards").chmod(0o777)
    status, said = ended(process, f"file://{tmp_path}/cards", monkeypatch, caplog)
    assert status == 2
    assert len(said) == 1 and str(tmp_path) in said[0]


@pytest.mark.parametrize("process", RUN)
def test_a_url_that_names_no_place(
    process: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = ended(process, "etcd://127.0.0.1:1", monkeypatch, caplog)
    assert status == 2
    assert "it names no prefix" in capsys.readouterr().err
