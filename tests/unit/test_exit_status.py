"""A place for cards that is of no use ends a process at its start: one sentence, status 2."""

import sys
from pathlib import Path

import pytest

import frontend.app
from backend_worker import worker
from common.discovery.settings import open_discovery
from common.errors import DiscoveryError, MmRouterError, NoWorkerError
from frontend.args import FrontendArgs
from frontend.processes import Siblings


@pytest.fixture(autouse=True)
def nothing_of_the_process_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker, frontend.app):
        monkeypatch.setattr(module, "configure_logging", lambda *_: None)
        monkeypatch.setattr(module, "configure_vllms_logging", lambda *_, **__: None)
    monkeypatch.setattr(frontend.app, "raise_file_limit", lambda _: None)
    for name in (
        "VLLM_HOST_IP",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        "VLLM_MEDIA_CONNECTOR",
        "VLLM_WORKER_MULTIPROC_METHOD",
    ):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes afterwards
        monkeypatch.delenv(name)


def a_worker_ends(
    discovery: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[object, list[str]]:
    """With which status, and what was said."""
    monkeypatch.setattr(sys, "argv", ["worker", "--model=m", f"--discovery={discovery}"])
    with caplog.at_level("ERROR"), pytest.raises(SystemExit) as caught:
        worker.run()
    return caught.value.code, [each.getMessage() for each in caplog.records]


def test_a_worker_without_etcd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, said = a_worker_ends("etcd://127.0.0.1:1/fleet", monkeypatch, caplog)
    assert status == 2
    assert len(said) == 1 and "etcd at 127.0.0.1:1 can't be used" in said[0]


def test_a_worker_with_a_directory_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards").chmod(0o777)
    status, said = a_worker_ends(f"file://{tmp_path}/cards", monkeypatch, caplog)
    assert status == 2
    assert len(said) == 1 and str(tmp_path) in said[0]


def test_a_worker_with_a_url_that_names_no_place(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = a_worker_ends("etcd://127.0.0.1:1", monkeypatch, caplog)
    assert status == 2
    assert "it names no prefix" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(DiscoveryError("no cards"), 2), (NoWorkerError("nobody"), 1)]
)
def test_a_frontend_ends_with_the_status_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: MmRouterError,
    status: int,
) -> None:
    async def serve(_: FrontendArgs, __: Siblings | None) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["frontend"])
    with caplog.at_level("ERROR"), pytest.raises(SystemExit) as caught:
        frontend.app.main(serve)
    assert caught.value.code == status
    assert [each.getMessage() for each in caplog.records] == [str(error)]


async def test_a_frontend_learns_at_first_sight_that_there_is_no_etcd() -> None:
    with pytest.raises(DiscoveryError, match="no cards can be read"):
        await anext(aiter(open_discovery("etcd://127.0.0.1:1/fleet").watcher().changes()))
