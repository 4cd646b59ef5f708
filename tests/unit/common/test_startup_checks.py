"""What is refused before vLLM is imported, by one check for ``frontend``, ``worker`` and ``up``."""

import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from common import fleet_key
from common.discovery.etcd import discovery as etcd
from common.errors import ConfigurationError, DiscoveryError, ListenError, MmRouterError
from common.startup_checks import check_frontend, check_worker
from tests.certificates import Authority
from tests.fakes.launched import model_at


def said(module: str, *flags: str, **environ: str) -> tuple[int, str]:
    """The status and the only line; nothing of vLLM was imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *flags],
        env=os.environ | environ, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert not imported & {"vllm", "torch", "transformers"}
    (line,) = (line for line in lines if not line.startswith("import time:"))
    return done.returncode, line


MISSING = [
    (["--discovery=/no/such"], "there is no directory /no/such for the workers' cards"),
    (["--discovery=file:///no/such"], "there is no directory /no/such for the workers' cards"),
    (["--fleet-key-file=/no/such"], "the fleet key /no/such can't be read"),
    (["--discovery=etcd://no.host.invalid/x"], "no host of etcd://no.host.invalid:2379/x is known"),
]


@pytest.mark.parametrize(("flags", "sentence"), MISSING)
@pytest.mark.parametrize(
    ("module", "first"),
    [("frontend", []), ("backend_worker", ["/"]), ("common.launcher", ["--port=0"])],
)
def test_each_command_says_the_same_at_once(
    module: str, first: list[str], flags: list[str], sentence: str
) -> None:
    status, line = said(module, *first, *flags)
    assert status == 2
    assert f"error: {sentence}" in line


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--api-key-file=/no"], "the API keys in /no can't be read"),
        (["--admin-key-file=/no"], "the admin keys in /no can't be read"),
        (["--ssl-certfile=/no"], "--ssl-certfile: /no can't be read"),
        (["--ssl_keyfile", "/no"], "--ssl-keyfile: /no can't be read"),
        (["--ssl-ca-certs=/no"], "--ssl-ca-certs: /no can't be read"),
        (["--discovery"], "expected one argument"),
    ],
)
def test_a_file_of_a_frontend_that_is_not_there(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_frontend(flags, listens=False)


def test_a_file_is_checked_whoever_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "frontend.yaml"
    config.write_text("ssl-certfile: /no\n")
    with pytest.raises(ConfigurationError, match="--ssl-certfile: /no can't be read"):
        check_frontend([f"--config={config}"], listens=False)
    monkeypatch.setenv("MMROUTER_DISCOVERY", str(config))
    for check in (lambda: check_frontend([], listens=False), lambda: check_worker(["/"])):
        with pytest.raises(DiscoveryError, match=f"there is no directory {config}"):
            check()


def test_tls_files_that_fit_and_others(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    one, other = authority.certify("127.0.0.1"), authority.certify("127.0.0.2")
    fits = [f"--ssl-certfile={one.certificate}", f"--ssl-keyfile={one.key}"]
    check_frontend(fits, listens=False)
    with pytest.raises(ConfigurationError, match="that of its own key") as caught:
        check_frontend([fits[0], f"--ssl-keyfile={other.key}"], listens=False)
    assert isinstance(caught.value.__cause__, ssl.SSLError)
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ConfigurationError, match=f"--ssl-ca-certs={junk} can't be used"):
        check_frontend([*fits, f"--ssl-ca-certs={junk}"], listens=False)


def test_keys_that_are_there(tmp_path: Path) -> None:
    key, keys = tmp_path / "fleet.key", tmp_path / "keys"
    fleet_key.new(key)
    keys.write_text("sesame\n")
    check_frontend([f"--fleet-key-file={key}", f"--api-key-file={keys}"], listens=False)
    with pytest.raises(ConfigurationError, match=f"{keys} and {keys} hold the same key"):
        check_frontend([f"--api-key-file={keys}", f"--admin-key-file={keys}"], listens=False)
    with pytest.raises(ConfigurationError, match=f"{key} and {key} hold the same key"):
        check_frontend([f"--api-key-file={key}", f"--fleet-key-file={key}"], listens=False)
    keys.write_text("# none\n")
    with pytest.raises(ConfigurationError, match="holds no API key"):
        check_frontend([f"--api-key-file={keys}"], listens=False)


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    real = socket.getaddrinfo

    def hang(host: str, *rest: object) -> object:
        if host == "127.0.0.1":
            return real(host, None)
        never.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(etcd, "LOOKUP_S", 0.1)
    with pytest.raises(DiscoveryError, match=r"a:1,b:2/x is known: no answer from the name server"):
        check_frontend(["--discovery=etcd://a:1,b:2/x"], listens=False)
    # One member suffices.
    monkeypatch.setattr(etcd, "LOOKUP_S", 100.0)
    check_frontend(["--discovery=etcd://a:1,127.0.0.1/x"], listens=False)
    never.set()


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid"])
def test_a_host_that_is_none(host: str) -> None:
    status, line = said("frontend", f"--host={host}")
    assert status == 3
    assert line.startswith(f"mmrouter frontend: error: --host={host} is no address of this machine")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.77", "is no address of this machine: `ip address` lists them"),
        ("no.such.host.invalid", "is no address of this machine: "),
        ("0.0.0.0", "is unusable: .*it must be one address of this host"),
    ],
)
def test_an_address_that_a_worker_can_not_have(host: str, reason: str) -> None:
    _, line = said("backend_worker", "/", f"--worker-host={host}")
    assert re.match(f"mmrouter worker: error: --worker-host='?{host}'? {reason}", line)


def test_a_port_that_a_worker_can_not_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use: .*worker-port"):
            check_worker(["/", f"--worker-port={port}"])


def test_a_worker_without_a_key_stays_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.startup_checks.free_port", lambda *_, **__: 0)
    with pytest.raises(ConfigurationError, match="leaves this host"):
        check_worker(["/", "--worker-host=10.0.0.5"])


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, line = said("frontend", f"--port={port}")
        assert status == 3
        wanted = f"port {port} on 127.0.0.1 is in use: choose another one with --port"
        assert line == f"mmrouter frontend: error: {wanted}"
        check_frontend([f"--port={port}"], listens=False)
        check_frontend([f"--port={port}", "--uds=/tmp/x"], listens=True)
        with pytest.raises(ListenError):
            check_frontend([f"--http-port={port}"], listens=True)
    check_frontend([f"--port={port}"], listens=True)


@pytest.mark.parametrize("place", ["", "/no/such/socket"])
def test_a_socket_that_can_not_be(tmp_path: Path, place: str) -> None:
    with pytest.raises(ListenError, match=r"--uds=\S+ can't be a socket"):
        check_frontend([f"--uds={tmp_path}{place}"], listens=True)


class Hub(BaseHTTPRequestHandler):
    """Answers for each model as the hub would."""

    ANSWERS: ClassVar[dict[str, tuple[int, str]]] = {
        "there/is": (200, ""),
        "there/without": (404, "EntryNotFound"),
        "nope/model": (401, "RepoNotFound"),
        "gated/model": (403, "GatedRepo"),
        "old/model": (404, "RevisionNotFound"),
        "busy/model": (503, ""),
    }
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        model = "/".join(self.path.split("/")[1:3])
        status, code = self.ANSWERS[model]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def asked_at(endpoint: str, home: Path, *flags: str, **environ: str) -> str | None:
    """What a worker's check says in a process of its own: the hub's client reads its environment
    when it is imported."""
    script = (
        "import sys; from common.startup_checks import check_worker; check_worker(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environ},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return None if done.returncode == 0 else done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["there/is"], None),
        (["there/without"], None),
        (["busy/model"], None),
        (["nope/model"], "has no such model, or a private one: check the name, or set HF_TOKEN"),
        (["--model=gated/model"], "accepted its terms: accept them"),
        (["old/model", "--revision=v9"], "has no revision 'v9'"),
    ],
)
def test_the_hub_is_asked_once(
    hub: str, tmp_path: Path, flags: list[str], sentence: str | None
) -> None:
    Hub.asked.clear()
    line = asked_at(hub, tmp_path, *flags)
    assert len(Hub.asked) == 1
    if sentence is None:
        assert line is None
    else:
        assert line is not None and "there is no directory" in line and sentence in line


@contextmanager
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    wanted = "the Hugging Face hub can't be reached ("
    assert wanted in str(asked_at("http://127.0.0.1:9", tmp_path, "nope/model"))
    with silent() as endpoint:
        line = asked_at(endpoint, tmp_path, "nope/model", HF_HUB_ETAG_TIMEOUT="1")
    assert wanted in str(line)
    offline = asked_at("http://127.0.0.1:9", tmp_path, "nope/model", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, but the cache of the hub (HF_HOME) lacks it" in str(offline)


def test_what_is_not_asked_for(tmp_path: Path) -> None:
    for name, configuration in (("cache", "config.json"), ("mistral", "params.json")):
        cached = tmp_path / "hub" / f"models--in--{name}"
        (cached / "snapshots" / "abc").mkdir(parents=True)
        (cached / "snapshots" / "abc" / configuration).write_text("{}")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
    nowhere = "http://127.0.0.1:9"
    assert asked_at(nowhere, tmp_path, "in/cache") is None
    assert asked_at(nowhere, tmp_path, "in/mistral") is None
    assert asked_at(nowhere, tmp_path, "in/mistral", HF_HUB_OFFLINE="1") is None
    assert asked_at(nowhere, tmp_path, "s3://bucket/model") is None
    assert asked_at(nowhere, tmp_path, "a/model", "--download-dir=/elsewhere") is None
    assert asked_at(nowhere, tmp_path, "a/model", VLLM_USE_MODELSCOPE="1") is None
    assert asked_at(nowhere, tmp_path, str(model_at(tmp_path / "model"))) is None


@pytest.mark.parametrize(
    "words",
    [
        ["{}", "--dtype", "float32"],
        ["--discovery={tmp}", "{}"],
        ["--load-format=dummy", "--model={}"],
        ["--model", "{}"],
        ["--dtype", "float32", "{}"],
        ["--enforce-eager", "{}"],
        ["--config={tmp}/file.yaml"],
    ],
)
def test_the_model_is_found_where_it_stands(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(f"model: {tmp_path}/gone\n")
    argv = [word.format(f"{tmp_path}/gone", tmp=tmp_path) for word in words]
    with pytest.raises(MmRouterError, match=r"there is no directory .*/gone"):
        check_worker(argv)


def test_without_a_model_nothing_starts() -> None:
    check_worker([], of_demo=True)
    for words in (["--dtype=float32"], ["--seed", "-1"], ["--lora-modules", "a=/b", "c=/d"]):
        with pytest.raises(ConfigurationError, match="MODEL or --model is required"):
            check_worker(words)
