"""A worker whose engine keeps encodings in the host's memory. Engines are simulated: vLLM has the
copies for GPUs only, and all but them is its own.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.e2e import lab
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.processes import START_TIMEOUT_S, Process, start_frontend
from tests.pictures import data_uri, picture
from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import start_sim_worker
from tests.simgpu.stats import Stats
from tests.simgpu.totals import read_totals

IN_HOST_MEMORY = "--ec-transfer-config=" + json.dumps(
    {
        "ec_connector": "ECCPUConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"ec_cpu_bytes": 16 << 20},
    }
)

LARGE = (896, 896)
"""Three of these are more than the engine's encoder cache has room for."""


class Keeping(NamedTuple):
    """A frontend over a worker, and what its engine has done."""

    router: Endpoint
    totals: Path

    def done(self, requests: int) -> Stats:
        """Once the engine has written that it had so many requests."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (totals := read_totals(self.totals)).requests < requests:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return totals


@pytest.fixture(scope="module")
def keeping(
    model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Keeping]:
    directory = tmp_path_factory.mktemp("keeping")
    cards, totals = directory / "cards", directory / "totals"
    gpu = GpuModel(speed=20)
    worker = start_sim_worker(
        "keeping", model, cards, directory, IN_HOST_MEMORY, stats=totals, gpu=gpu
    )
    frontend = start_frontend("keeping-frontend", cards, directory)
    try:
        wait_for_workers(frontend, [worker])
        endpoint = Endpoint(frontend.url)
        yield Keeping(endpoint, totals)
        endpoint.close()
    finally:
        let_go(frontend, worker)


def about(name: str, question: str) -> list[dict[str, Any]]:
    return [lab.image(data_uri(picture(f"encoding-{name}", LARGE))), lab.words(question)]


def test_pictures_that_left_the_encoder_cache_are_copied_back(keeping: Keeping) -> None:
    names = ("one", "other", "third", "fourth")
    texts = [lab.text(lab.ask(keeping.router, about(name, "What is it?"))) for name in names]
    first = keeping.done(len(names))
    assert (first.encoder_items, first.loaded_items) == (len(names), 0)
    again = [lab.text(lab.ask(keeping.router, about(name, "What is it?"))) for name in names]
    then = keeping.done(2 * len(names))
    assert again == texts
    assert (then.encoder_items, then.loaded_items) == (len(names), len(names))


def test_what_would_leave_encodings_of_other_weights_is_refused(keeping: Keeping) -> None:
    reply = keeping.router.http.post("/mmrouter/workers/reset_encoder_cache")
    assert reply.status_code == 409, reply.text
    assert "restart the worker" in reply.text


def engine_of(worker: Process) -> psutil.Process:
    """Standing still, as soon as it has its memory."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        worker.check_alive()
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(worker.pid).children(recursive=True):
                if memory_of(each):
                    each.suspend()
                    return each
    raise AssertionError("no engine has any")


def memory_of(process: psutil.Process) -> set[Path]:
    found: set[Path] = set()
    for opened in Path(f"/proc/{process.pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            name = opened.readlink()
            if name.match("/dev/shm/vllm_ec_*"):
                found.add(name)
    return found


def stop(worker: Process, _: psutil.Process) -> None:
    worker.signal(signal.SIGTERM)


def kill_worker(worker: Process, _: psutil.Process) -> None:
    psutil.Process(worker.pid).children()[0].kill()


def kill_engine(_: Process, engine: psutil.Process) -> None:
    engine.kill()


@pytest.mark.parametrize("ends", [stop, kill_worker, kill_engine])
def test_nothing_is_left_of_a_worker_that_ends_while_its_engine_starts(
    model: Path, tmp_path: Path, ends: Callable[[Process, psutil.Process], None]
) -> None:
    worker = start_sim_worker(
        "starting", model, tmp_path / "cards", tmp_path, IN_HOST_MEMORY,
        stats=tmp_path / "totals", gpu=GpuModel(),
    )  # fmt: skip
    try:
        engine = engine_of(worker)
        (file,) = memory_of(engine)
        assert file.exists()
        ends(worker, engine)
        worker.wait(60)
        assert not file.exists()
    finally:
        worker.stop()
