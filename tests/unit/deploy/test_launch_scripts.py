"""Each launch script is run. Frontends and workers are played, and what they were called with goes
through the real command lines; tests/e2e runs scripts with engines."""

import contextlib
import os
import re
import shutil
import signal
import socket
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
from tests.certificates import Authority
from tests.e2e.processes import Process
from tests.fakes.launched import calls, interpreter, model_at
from tests.ports import free_port

SCRIPTS = Path(__file__).parents[3] / "examples" / "launch"
READY = "Ctrl-C stops everything"
UNSET = "unset"
PLAYED = '{"content": "played"}'

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def pasted(printed: str) -> str:
    """What the curl of a script answers, as pasted into a shell."""
    (curl,) = re.findall(r"^\s*(curl .*?)(?:\n\s*\n|\Z)", printed, re.M | re.S)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


class Launch:
    """A script that runs with played processes."""

    def __init__(self, directory: Path, script: str, *flags: str, **variables: str) -> None:
        directory.mkdir()
        self.directory = directory
        python = str(interpreter(directory))
        defaults = {
            "MODEL": str(model_at(directory / "model")),
            "RUN_DIR": str(directory / "run"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        hidden = variables.get("CUDA_VISIBLE_DEVICES", "") == UNSET
        unset = ["env", "-u", "CUDA_VISIBLE_DEVICES"] if hidden else []
        self.process = Process(
            script,
            [*unset, str(SCRIPTS / script), *flags],
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
        assert pasted(printed) == PLAYED
        (url,) = re.findall(r"at (http://127.0.0.1:[0-9]+)\. Try:", printed)
        assert f"examples/send_pictures.py --stream --url {url}\n" in printed
        started = calls(one.directory, "frontend") + calls(one.directory, "backend_worker")
        assert [call.environment["DYNAMO_MM_TRANSFER"] for call in started] == ["nixl"] * 3
        assert {worker.worker_id for worker in one.workers} == {"worker-0", "worker-1"}


def test_a_frontend_that_asks_for_a_key_gets_it_from_its_file_and_nobody_sees_it(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "api keys"
    keys.write_text("# of users\n\nsesame\n")
    variables = {"WORKERS": "1", "FRONTEND_ARGS": f"--api-key-file '{keys}'"}
    with launched(tmp_path / "one", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        assert "sesame" not in printed
        assert pasted(printed) == PLAYED
        assert 'OPENAI_API_KEY="$(grep ' in printed


@pytest.mark.parametrize("form", ["{0} {1}", "file"])
def test_over_tls(form: str, tmp_path: Path) -> None:
    """The certificate is of an authority that no system knows."""
    pair = Authority(tmp_path / "ca").certify("127.0.0.1")
    files = {"--ssl-certfile": pair.certificate, "--ssl-keyfile": pair.key}
    arguments = " ".join(form.format(flag, path) for flag, path in files.items())
    if form == "file":
        config = tmp_path / "frontend.yaml"
        config.write_text("".join(f"{flag[2:]}: {path}\n" for flag, path in files.items()))
        arguments = f"--config {config}"
    variables = {"WORKERS": "1", "FRONTEND_ARGS": arguments}
    with launched(tmp_path / "one", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        assert re.search(r"at https://127.0.0.1:[0-9]+\. Try:", printed)
        assert " --cacert " in printed and "--insecure" not in printed
        assert pasted(printed) == PLAYED


def test_over_tls_with_a_certificate_for_another_host(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "ca").certify("models.example.org")
    arguments = f"--ssl-certfile {pair.certificate} --ssl-keyfile {pair.key}"
    variables = {"WORKERS": "1", "FRONTEND_ARGS": arguments, "HOST": "0.0.0.0"}
    with launched(tmp_path / "one", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        assert "--insecure, since its certificate is not one for 127.0.0.1." in printed
        assert pasted(printed) == PLAYED


def test_a_frontend_that_asks_for_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, client = authority.certify("127.0.0.1"), authority.certify("client")
    variables = {
        "WORKERS": "1",
        "FRONTEND_ARGS": f"--ssl-certfile {pair.certificate} --ssl-keyfile {pair.key} "
        f"--ssl-ca-certs {authority.certificate} --ssl-cert-reqs=2",
    }
    with launched(tmp_path / "without", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        printed = one.process.log.read_text()
        assert re.search(r"at https://127.0.0.1:[0-9]+\. Try:", printed)
        assert "It asks for a client certificate: name one with CLIENT_CERT=" in printed
        one.process.check_alive()
    variables |= {"CLIENT_CERT": str(client.certificate), "CLIENT_KEY": str(client.key)}
    with launched(tmp_path / "with", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        assert pasted(one.process.log.read_text()) == PLAYED


def test_all_addresses_of_a_host(tmp_path: Path) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with launched(tmp_path / "one", "agg_multimodal_router.sh", WORKERS="1", HOST="::") as one:
        one.until(READY)
        assert pasted(one.process.log.read_text()) == PLAYED


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    variables = {"WORKERS": "1", "FRONTEND_ARGS": f"--uds {path}"}
    with launched(tmp_path / "one", "agg_multimodal_router.sh", **variables) as one:
        one.until(READY)
        assert pasted(one.process.log.read_text()) == PLAYED


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
            WORKER_HOST="127.0.0.2", WORKERS="1", WORKER_NAME="gpu-1",
        ) as back,
    ):  # fmt: skip
        front.until(READY)
        back.until(READY)
        (frontend,), (worker,) = front.frontends, back.workers
        assert (front.workers, back.frontends) == ([], [])
        assert worker.worker_id == "gpu-1-0"
        assert worker.worker.endpoint.startswith("tcp://127.0.0.2:")
        for process in (frontend.process, worker.process):
            assert process.fleet_key_file == key


ROUTER = "agg_multimodal_router.sh"


@pytest.mark.parametrize(
    ("script", "variables", "sentence"),
    [
        ("worker_host.sh", {}, "WORKER_HOST: is the address"),
        ("frontend_host.sh", {"FLEET_KEY_FILE": "x"}, "DISCOVERY: is where all hosts find cards"),
        (ROUTER, {"WORKERS": "0"}, "--workers=0 starts frontends only: set --discovery"),
        (ROUTER, {"SINGLE_GPU": "yes"}, "SINGLE_GPU='yes' is not one of: true false"),
        (ROUTER, {"MODEL": ""}, "the model is empty"),
        (ROUTER, {"CLIENT_CERT": "/no/such"}, "CLIENT_CERT=/no/such can't be used"),
        (ROUTER, {"TMPDIR": "/no/such"}, "TMPDIR=/no/such can't be written to"),
    ],
)
def test_what_can_t_be_is_said_before_anything_is_started(
    script: str, variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    launch = Launch(tmp_path / "launch", script, **variables)
    try:
        assert launch.process.wait(120) != 0
        printed = launch.process.log.read_text()
        assert sentence in printed
        assert "Traceback" not in printed and "logs:" not in printed
        assert (
            calls(launch.directory, "frontend") == calls(launch.directory, "backend_worker") == []
        )
    finally:
        launch.process.stop()


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a)
  MIG 3g.40gb     Device  0: (UUID: MIG-1a)
  MIG 3g.40gb     Device  1: (UUID: MIG-1b)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0b)
"""


def test_each_worker_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    (programs / "nvidia-smi").chmod(0o755)
    machine = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "WORKERS": "3",
        "PLAYED_BUILD": "cuda",
        "CUDA_VISIBLE_DEVICES": UNSET,
    }
    with launched(tmp_path / "one", ROUTER, **machine) as one:
        one.until(READY)
        workers = calls(one.directory, "backend_worker")
        workers.sort(key=lambda call: call.value("--worker-id"))
        given = [call.environment["CUDA_VISIBLE_DEVICES"] for call in workers]
        assert given == ["MIG-1a", "MIG-1b", "1"], "a GPU that is divided has its instances"
        (frontend,) = calls(one.directory, "frontend")
        assert frontend.environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_each_says_how_it_is_used(script: str) -> None:
    done = subprocess.run(["bash", SCRIPTS / script, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert script in done.stdout


def test_each_variable_is_a_flag(tmp_path: Path) -> None:
    echo = tmp_path / "python"
    echo.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    variables = {
        "MMROUTER_PYTHON": str(echo),
        "MODEL": "a model",
        "PORT": "8000",
        "WORKERS": "1",
        "WORKER_HOST": "10.0.0.5",
        "GPU_MEMORY_UTILIZATION": "0.4",
        "SINGLE_GPU": "true",
        "ENGINE_ARGS": "--trust-remote-code --seed 'a b'",
    }
    done = subprocess.run(
        ["bash", SCRIPTS / ROUTER, "--max-model-len", "1024"],
        env={"PATH": os.environ["PATH"]} | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "-m", "common.launcher", "--port=8000", "--model=a model", "--workers=1",
        "--engine-args=--trust-remote-code --seed 'a b'", "--worker-host=10.0.0.5",
        "--gpu-memory-utilization=0.4", "--single-gpu", "--trust-remote-code", "--max-model-len",
        "1024",
    ]  # fmt: skip
