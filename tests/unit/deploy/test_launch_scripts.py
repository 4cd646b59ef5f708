"""Each launch script is run. Frontends and workers are played, and what they were called with goes
through the real command lines; tests/e2e runs scripts with engines."""

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_worker.args import WorkerArgs
from backend_worker.args import parse as parse_worker
from common import fleet_key
from frontend.args import FrontendArgs
from frontend.args import parse as parse_frontend
from tests.e2e.processes import Process
from tests.fakes.launched import calls, interpreter
from tests.ports import free_port

SCRIPTS = Path(__file__).parents[3] / "examples" / "launch"
READY = "Ctrl-C stops everything"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


class Launch:
    """A script that runs with played processes."""

    def __init__(self, directory: Path, script: str, *flags: str, **variables: str) -> None:
        directory.mkdir()
        self.directory = directory
        python = str(interpreter(directory))
        defaults = {"MODEL": "some/model", "RUN_DIR": str(directory / "run")}
        self.process = Process(
            script,
            [str(SCRIPTS / script), *flags],
            directory / "script.log",
            **defaults | {"MMROUTER_PYTHON": python, "DISCOVERY": "", **variables},
        )

    def until(self, line: str) -> None:
        """Wait until the script has said something."""
        deadline = time.monotonic() + 120
        while line not in self.process.log.read_text():
            assert time.monotonic() < deadline, self.process.tail()
            self.process.check_alive()
            time.sleep(0.05)

    def stop(self) -> None:
        """As by Ctrl-C, after which the files that went with it are gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.signal(signal.SIGINT)
        self.process.wait(60)
        self.process.stop()

    @property
    def frontends(self) -> list[FrontendArgs]:
        """What they were called with."""
        return [parse_frontend(call.argv) for call in calls(self.directory, "frontend")]

    @property
    def workers(self) -> list[WorkerArgs]:
        """What they were called with."""
        return [parse_worker(call.argv) for call in calls(self.directory, "backend_worker")]


@contextlib.contextmanager
def launched(directory: Path, script: str, *flags: str, **variables: str) -> Iterator[Launch]:
    launch = Launch(directory, script, *flags, **variables)
    try:
        yield launch
    finally:
        launch.stop()


def test_one_host_serves_the_curl_that_it_prints_and_passes_the_transfer_mode_on(
    tmp_path: Path,
) -> None:
    with launched(
        tmp_path / "one", "agg_multimodal_router.sh", DYNAMO_MM_TRANSFER="nixl", WORKERS="2"
    ) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        (curl,) = re.findall(r"^\s*(curl .*?)(?:\n\s*\n|\Z)", printed, re.M | re.S)
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
        assert (answer.returncode, answer.stdout) == (0, '{"content": "played"}'), answer.stderr
        started = calls(one.directory, "frontend") + calls(one.directory, "backend_worker")
        assert [call.environment["DYNAMO_MM_TRANSFER"] for call in started] == ["nixl"] * 3
        assert {worker.worker_id for worker in one.workers} == {"worker-0", "worker-1"}


def test_a_frontend_that_asks_for_a_key_is_served_without_a_curl(tmp_path: Path) -> None:
    """The script has no key, so it can't ask for the model's name. That is not its end."""
    variables = {"WORKERS": "1", "FRONTEND_ARGS": "--api-key-file keys"}
    with launched(tmp_path / "one", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        assert "/v1/models answered with status 401" in printed
        assert "The frontend says more to whoever has its key" in printed
        assert not re.search(r"^\s*curl ", printed, re.M)
        one.process.check_alive()


def test_what_is_awaited_is_said(tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    cards.mkdir()
    with launched(
        tmp_path / "one", "agg_multimodal_router.sh", WORKERS="0", DISCOVERY=str(cards)
    ) as one:
        one.until("] waiting for frontend: it has no worker yet")
        (cards / "a-worker-of-elsewhere").touch()
        one.until(READY)


def test_several_frontends_have_a_port_each(tmp_path: Path) -> None:
    port = free_port()
    with launched(tmp_path / "several", "several_frontends.sh", PORT=str(port), WORKERS="1") as it:
        it.until(READY)
        assert f"http://127.0.0.1:{port}. Try" in it.process.log.read_text()
        assert f"Ready at http://127.0.0.1:{port + 1}, too" in it.process.log.read_text()
        assert {each.serve.port for each in it.frontends} == {port, port + 1}
        assert len(it.workers) == 1


def test_two_ranks(tmp_path: Path) -> None:
    with launched(tmp_path / "ranks", "two_ranks.sh", "--max-model-len", "1024") as it:
        it.until(READY)
        (worker,) = it.workers
        assert worker.engine.data_parallel_size == 2
        assert worker.engine.max_model_len == 1024


def test_frontends_and_workers_on_hosts_of_their_own(tmp_path: Path) -> None:
    key, cards = tmp_path / "fleet.key", tmp_path / "cards"
    fleet_key.new(key)
    cards.mkdir(mode=0o700)
    common = {"FLEET_KEY_FILE": str(key), "DISCOVERY": str(cards)}
    with (
        launched(tmp_path / "front", "frontend_host.sh", **common) as front,
        launched(
            tmp_path / "back", "worker_host.sh", **common,
            WORKER_HOST="10.0.0.5", WORKERS="1", WORKER_NAME="gpu-1",
        ) as back,
    ):  # fmt: skip
        front.until(READY)
        back.until(READY)
        (frontend,), (worker,) = front.frontends, back.workers
        assert (front.workers, back.frontends) == ([], [])
        assert worker.worker_id == "gpu-1-0"
        assert worker.worker.endpoint.startswith("tcp://10.0.0.5:")
        for process in (frontend.process, worker.process):
            assert process.fleet_key_file == key


@pytest.mark.parametrize(
    ("script", "variables", "sentence"),
    [
        ("worker_host.sh", {}, "WORKER_HOST: is the address"),
        ("frontend_host.sh", {"FLEET_KEY_FILE": "x"}, "DISCOVERY: is where all hosts find cards"),
        ("agg_multimodal_router.sh", {"WORKERS": "0"}, "WORKERS=0 needs DISCOVERY"),
        ("agg_multimodal_router.sh", {"FRONTENDS": "some"}, "FRONTENDS must be a number"),
        ("agg_multimodal_router.sh", {"MODEL": ""}, "MODEL is not set"),
        ("agg_multimodal_router.sh", {"MODEL": "broken", "WORKERS": "1"}, "max_model_len is too"),
    ],
)
def test_what_can_t_be_is_said(
    script: str, variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    launch = Launch(tmp_path / "launch", script, **variables)
    try:
        assert launch.process.wait(120) != 0
        assert sentence in launch.process.log.read_text()
    finally:
        launch.process.stop()


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_each_says_how_it_is_used(script: str) -> None:
    done = subprocess.run(["bash", SCRIPTS / script, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert script in done.stdout
