"""How a worker leaves, and how it ends where its engine can't be started."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_worker import worker
from backend_worker.args import parse
from common.discovery.base import CardPublisher
from common.errors import ConfigurationError, DiscoveryError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard, WorkerState
from tests.fakes.cards import make_card
from tests.waiting import until


class Service:
    """As much of a service as leaving takes."""

    active_requests = 0

    def __init__(self) -> None:
        self.drained = False

    async def drain(self) -> None:
        self.drained = True


class Publisher(CardPublisher):
    """Refuses, or hangs."""

    def __init__(self, error: Exception | None) -> None:
        self.asked = asyncio.Event()
        self._error = error

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        raise AssertionError("it serves already")

    async def publish(self, card: WorkerCard) -> None:
        assert card.state is WorkerState.DRAINING
        self.asked.set()
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    async def withdraw(self) -> None:
        pass


@pytest.mark.parametrize("error", [DiscoveryError("the directory is gone"), None])
async def test_a_worker_that_can_not_say_that_it_leaves_drains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    monkeypatch.setattr(worker, "SAY_S", 0.05)
    args = parse(["--model", "m", f"--discovery={tmp_path}"])
    service: Any = Service()
    publisher = Publisher(error)
    leaving = asyncio.create_task(worker._leave(args, service, publisher, make_card()))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await publisher.asked.wait()
    await until(leaving.done)
    await leaving
    assert service.drained


@pytest.fixture(autouse=True)
def on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command sets it, so that it goes afterwards; what frontends here set is gone."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)


@pytest.fixture
def unstartable(model: Path, tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return shutil.copytree(model, tmp_path / "copy")


async def refused(model: Path, directory: Path, *flags: str) -> str:
    """What a worker says of its engine."""
    args = parse([str(model), f"--discovery={directory}", *flags])
    with pytest.raises(ConfigurationError) as caught:
        await worker._run(args)
    return str(caught.value)


async def test_an_architecture_that_nobody_knows_is_a_sentence(
    unstartable: Path, tmp_path: Path
) -> None:
    file = unstartable / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "foo", "architectures": ["Foo"]}
    file.write_text(json.dumps(config))
    said = await refused(unstartable, tmp_path)
    assert said.startswith(f"the engine of {unstartable} did not start: ")
    assert "does not recognize this architecture" in said
    assert "\n" not in said and "pydantic" not in said


async def test_a_context_that_the_model_has_not_is_a_sentence(model: Path, tmp_path: Path) -> None:
    said = await refused(model, tmp_path, "--max-model-len=999999999")
    assert "is greater than the derived max_model_len" in said
    assert "\n" not in said


def test_the_command_says_at_once_that_there_is_no_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "backend_worker", f"{tmp_path}/nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (f"mmrouter worker: error: there is no directory {tmp_path}/nothing\n")


def test_a_tokenizer_that_is_not_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([str(model), f"--discovery={tmp_path}", "--tokenizer=/no/such"])
    assert "error: --tokenizer: there is no /no/such\n" in capsys.readouterr().err


class Down(Publisher):
    """Refuses until it is up."""

    def __init__(self, refusals: float) -> None:
        super().__init__(None)
        self.refusals = refusals

    async def publish(self, card: WorkerCard) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise DiscoveryError("etcd is down")


async def test_an_engine_that_has_started_waits_for_discovery(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "RENEW_S", 0.01)
    publisher = Down(3)
    await worker._publish(publisher, make_card())
    assert publisher.refusals == 0
    assert caplog.text.count("etcd is down; trying again") == 1
    monkeypatch.setattr(worker, "PUBLISH_S", 0.03)
    with pytest.raises(DiscoveryError, match="etcd is down"):
        await worker._publish(Down(float("inf")), make_card())
