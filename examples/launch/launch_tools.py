"""What the launch scripts need beyond a shell; no processes are started or ended here.

Standard library only, except for drawing the picture and reading the file of ``--config``, so that
asking is quick.
"""

import argparse
import base64
import errno
import http.client
import io
import itertools
import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

NOBODY, SILENT, LOCKED = 0, -1, -2
"""Instead of a status: nobody listens; no answer in time; a client certificate is asked for."""

CLIENT_CERT, CLIENT_KEY = "CLIENT_CERT", "CLIENT_KEY"
"""Variables that name PEM files, for frontends that ask for a client certificate."""


class Connection(http.client.HTTPConnection):
    """To a frontend, at an address or a Unix socket, over TLS or not."""

    def __init__(self, url: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        self.parts = urlsplit(url)
        super().__init__(self.parts.hostname or "localhost", self.parts.port, timeout)
        self.tls = tls

    def connect(self) -> None:
        if self.parts.scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.parts.path)
        else:
            super().connect()
        if self.tls is not None:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)


def client_tls() -> ssl.SSLContext:
    """Without a look at the frontend's certificate: the script started it, and tells it nothing.

    Raises:
        SystemExit: the client certificate can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate := os.environ.get(CLIENT_CERT):
        try:
            context.load_cert_chain(certificate, os.environ.get(CLIENT_KEY) or None)
        except OSError as error:  # that of TLS is one
            raise SystemExit(
                f"{CLIENT_CERT}={certificate} can't be used: {error}; it is a PEM file, and "
                f"{CLIENT_KEY} that of its key, unless the key is in the same file"
            ) from None
    return context


def ask(
    url: str, path: str, timeout: float, tls: ssl.SSLContext | None, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection = Connection(url, timeout, tls)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def get(
    url: str, path: str, timeout: float = 2.0, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body, over TLS if nothing else is answered; or NOBODY, SILENT or LOCKED."""
    schemes = (client_tls(),) if url.startswith("https:") else (None, client_tls())
    status = NOBODY
    for tls in schemes:
        try:
            return ask(url, path, timeout, tls, headers or {})
        except TimeoutError:
            return SILENT, b""
        except ssl.SSLError as error:
            # TLS 1.3 says so in answer to the request, TLS 1.2 fails in the handshake.
            status = LOCKED if "CERTIFICATE_REQUIRED" in str(error) or locked(error) else NOBODY
        except (OSError, http.client.HTTPException):
            status = NOBODY  # it speaks TLS, or nobody is there
    return status, b""


def locked(error: ssl.SSLError) -> bool:
    """Whether a handshake ended since we have no certificate, or none that is trusted."""
    return bool(re.search("HANDSHAKE_FAILURE|UNKNOWN_CA|BAD_CERTIFICATE", str(error)))


def over_tls(url: str, context: ssl.SSLContext) -> ssl.SSLSocket | None:
    """A connection by which a context is content with the frontend; None if it is not."""
    connection = Connection(url, 5.0, context)
    try:
        connection.connect()
    except OSError:
        return None
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock


def address(host: str) -> str:
    """Where this host reaches a frontend that listens on a host's name or address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached


def port(host: str, wanted: int, taken: list[int]) -> int:
    """The wanted port if it is free, for 0 any free one but those that are taken."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            found = probe.getsockname()[1]
            # Meanwhile this one is held, so another is found.
            return port(host, wanted, []) if found in taken else found
    except socket.gaierror as error:
        raise SystemExit(f"HOST={host} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"port {wanted} on {host} is in use: choose another one with PORT="
            ) from None
        raise SystemExit(f"HOST={host} PORT={wanted}: {error.strerror}") from None


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, an instance of MIG each where a GPU is divided."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA takes none from the first on that means nothing.
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    found: list[str] = []
    for line in listed.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+): ", line):
            found.append(gpu[1])
        elif instance := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if found and found[-1].isdigit():
                found.pop()  # as a whole it is its first instance
            found.append(instance[1])
    return found


def progress(url: str, log: Path | None) -> str:
    """The state of the frontend, then the ids of the workers it knows, in one line. One that asks
    for a key or a certificate does not say whom it knows.
    """
    status, body = get(url, "/mmrouter/workers")
    if status == LOCKED:
        served = log is None or re.search(rb"frontend\.app: serving ", log.read_bytes())
        return "guarded" if served else "waiting"
    if status in (NOBODY, SILENT):
        return "busy" if status == SILENT else "starting"
    health, _ = get(url, "/health")
    if status in (401, 403):
        return "guarded" if health == 200 else "waiting"
    workers = [str(worker["worker_id"]) for worker in json.loads(body)] if status == 200 else []
    return " ".join(["healthy" if health == 200 else "waiting", *workers])


STAGES = (
    (rb"worker .+ serves .+ at ", "waiting until it is found"),
    (rb"KV cache size: ", "warming up"),
    (rb"Loading weights took ", "making room for its KV cache"),
    (rb"Starting to load model ", "loading weights"),
    (rb"Initializing a V1 LLM engine ", "starting its device"),
    (rb"Resolved architecture: ", "starting its engine"),
)
"""What a worker's log says, the last of its start first, and what it does then."""

FRONTENDS = {
    "busy": "it is there and does not answer yet",
    "starting": "it does not listen yet",
    "waiting": "it has no worker yet, or loads the model's processor",
}


def stage(log: Path) -> str:
    """What a worker that wrote this log is doing."""
    said = log.read_bytes()
    return next((doing for line, doing in STAGES if re.search(line, said)), "importing vLLM")


def awaited(frontends: dict[str, Path | None], logs: dict[str, Path]) -> str:
    """What is not ready yet, in one line; empty if all is.

    Args:
        frontends: their logs, by URL.
        logs: of workers, by name. One is ready if every frontend that says whom it knows has it,
            or, where none says so, if its log does.
    """
    states = [progress(url, log).split() for url, log in frontends.items()]
    telling = [known for state, *known in states if state != "guarded"]
    told = [
        f"frontend{f'-{number}' if number else ''}: {FRONTENDS[state]}"
        for number, (state, *_) in enumerate(states)
        if state in FRONTENDS
    ]
    for name, log in logs.items():
        doing = stage(log)
        if any(name not in known for known in telling) or (not telling and doing != STAGES[0][1]):
            told.append(f"{name}: {doing}")
    return "; ".join(told)


def shared_memory(sessions: set[int]) -> list[str]:
    """Segments in /dev/shm that any process of these sessions has mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # After the command's name, which is in brackets: state, parent, group, session.
            session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
            if session not in sessions:
                continue
            paths = [line.split(maxsplit=5)[-1] for line in (process / "maps").open()]
            paths += [str(link.readlink()) for link in (process / "fd").iterdir()]
        except (OSError, IndexError):
            continue  # it ended, or it is not ours to look at
        found.update(path.strip() for path in paths if path.startswith("/dev/shm/"))
    return sorted(path for path in found if Path(path).exists())


def processes_left(sessions: set[int]) -> list[int]:
    """Ids of the processes of these sessions that have not ended; a zombie has."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) in sessions and state not in "ZX":
            left.append(int(process.name))
    return left


def picture() -> str:
    """A small drawing as a data URI, short enough to paste into a terminal."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (112, 112), 0)
    image.putpalette([255, 255, 255, 200, 30, 30, 30, 60, 200, 240, 200, 40])
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 56, 48, 104), fill=1)
    draw.ellipse((56, 48, 104, 96), fill=2)
    draw.polygon([(56, 4), (96, 40), (24, 40)], fill=3)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Trust(NamedTuple):
    """How a client comes to trust a frontend's certificate.

    Attributes:
        curl: flags of curl.
        note: for people; empty if there is nothing to say.
        file: what to trust, if it is not what the system trusts.
    """

    curl: str = ""
    note: str = ""
    file: Path | None = None


def trust(url: str, directory: Path) -> Trust:
    """Try the system's authorities, then the certificate itself, which is written to a file."""
    if seen := over_tls(url, ssl.create_default_context()):
        seen.close()
        return Trust()
    file = directory / "frontend.pem"
    if shown := over_tls(url, client_tls()):
        certificate = shown.getpeercert(binary_form=True) or b""
        shown.close()
        file.write_text(ssl.DER_cert_to_PEM_cert(certificate))
        itself = ssl.create_default_context(cafile=file)
        itself.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as curl does
        if known := over_tls(url, itself):
            known.close()
            return Trust(f" --cacert {shlex.quote(str(file))}", file=file)
    host = urlsplit(url).hostname
    return Trust(" --insecure", f"--insecure, since its certificate is not one for {host}.")


@dataclass(frozen=True)
class Told:
    """What the frontends' flags say that a client must know.

    Attributes:
        uds: the Unix socket to listen on.
        key: an API key, and how a shell gets it; two empty strings if none is needed.
    """

    uds: str = ""
    key: tuple[str, str] = ("", "")


def told(arguments: list[str]) -> Told:
    """Read FRONTEND_ARGS, and the file of ``--config``.

    Raises:
        SystemExit: they say something that the script has to say.
    """
    parser = argparse.ArgumentParser("FRONTEND_ARGS", allow_abbrev=False, add_help=False)
    for flag in ("--host", "--port", "--uds", "--api-key-file", "--config"):
        parser.add_argument(flag, flag.replace("-", "_").replace("__", "--"))
    parser.add_argument("--api-key", "--api_key", nargs="*")
    found, _ = parser.parse_known_args(arguments)
    for name in ("host", "port"):
        if getattr(found, name) is not None:
            raise SystemExit(
                f"FRONTEND_ARGS has --{name}, which the script chooses: say {name.upper()}= instead"
            )
    config = found.config or os.environ.get("MMROUTER_CONFIG")
    file = read_config(Path(config)) if config else {}
    key_file = (
        found.api_key_file
        or os.environ.get("MMROUTER_API_KEY_FILE")
        or str(file.get("api-key-file", ""))
    )
    uds = found.uds or str(file.get("uds", ""))
    return Told(uds, key(found.api_key or file.get("api-key"), key_file))


def read_config(path: Path) -> dict[str, object]:
    """Keys of a YAML file with dashes; none if it is not right, which the frontend says better."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SystemExit(f"--config {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(name).replace("_", "-"): value for name, value in pairs}


def key(given: object, file: str) -> tuple[str, str]:
    """An API key, and how a shell gets it, which does not show it."""
    keys = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    if file:
        try:
            lines = [line.strip() for line in Path(file).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"the API keys in {file} can't be read: {error}") from None
        if kept := [line for line in lines if line and not line.startswith("#")]:
            pattern = shlex.quote("^[^#[:space:]]")
            place = shlex.quote(str(Path(file).resolve()))
            return kept[0], f"$(grep -m 1 {pattern} {place})"
    if keys:
        return str(keys[0]), "$API_KEY"
    return (
        (os.environ.get("VLLM_API_KEY", ""), "$VLLM_API_KEY")
        if (os.environ.get("VLLM_API_KEY"))
        else ("", "")
    )


def tries(url: str, directory: Path, arguments: list[str]) -> str:
    """What to paste: a curl that sends a picture to the first model, and the example client."""
    bearer, shown = told(arguments).key
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    status, body = get(url, "/v1/models", 30, headers)
    if status == LOCKED:
        raise SystemExit(
            "It asks for a client certificate: name one with CLIENT_CERT=, and its key with "
            "CLIENT_KEY=, for a curl to paste here."
        )
    if status != 200:
        raise SystemExit(f"{url}/v1/models answered with status {status}: {body[:500]!r}")
    content = [
        {"type": "image_url", "image_url": {"url": picture()}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    request = {
        "model": json.loads(body)["data"][0]["id"],
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 32,
        "temperature": 0,
    }
    trusted = trust(url, directory) if url.startswith("https:") else Trust()
    flags = trusted.curl
    if certificate := os.environ.get(CLIENT_CERT):
        flags += f" --cert {shlex.quote(certificate)}"
    if client_key := os.environ.get(CLIENT_KEY):
        flags += f" --key {shlex.quote(client_key)}"
    if shown:
        flags += f' -H "Authorization: Bearer {shown}"'
    return "\n\n".join(
        [
            *(["Put a key of --api-key into API_KEY first."] if shown == "$API_KEY" else ()),
            curl(url, flags, json.dumps(request)),
            *([trusted.note] if trusted.note else ()),
            *example_client(url, trusted, shown),
        ]
    )


def curl(url: str, flags: str, body: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        flags += f" --unix-socket {shlex.quote(parts.path)}"
        url = "http://localhost"
    header = shlex.quote("Content-Type: application/json")
    return f"curl -s{flags} {url}/v1/chat/completions -H {header} -d {shlex.quote(body)}"


def example_client(url: str, trusted: Trust, shown: str) -> list[str]:
    """How it is called; nothing where it can't be."""
    if url.startswith("unix:") or trusted.note or os.environ.get(CLIENT_CERT):
        return []
    script = Path(__file__).parents[1] / "send_pictures.py"
    environment = f'OPENAI_API_KEY="{shown}" ' if shown else ""
    command = " ".join(shlex.quote(relative(part)) for part in (sys.executable, str(script)))
    file = "" if trusted.file is None else f" --cacert {shlex.quote(str(trusted.file))}"
    call = f"{environment}{command} --stream --url {url}{file}"
    return ["Or several pictures, with the worker that answered each:", call]


def relative(path: str) -> str:
    """A path as it is written in the working directory, if it is below it."""
    try:
        return str(Path(path).absolute().relative_to(Path.cwd()))
    except ValueError:
        return path


def url_of(url: str) -> str:
    """A frontend's URL, with the scheme that it speaks."""
    if not url.startswith("http:"):
        return url
    try:
        ask(url, "/health", 5.0, None, {})
    except (OSError, http.client.HTTPException):
        return url.replace("http:", "https:", 1)
    return url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    match options.what, options.arguments:
        case "port", [host, wanted, *taken]:
            print(port(host, int(wanted or 0), [int(one) for one in taken]))
        case "gpus", []:
            print("".join(f"{gpu}\n" for gpu in gpus()), end="")
        case "model", [model, *arguments]:
            from common.model_files import fault_of, model_in

            _, given = model_in([model, *arguments]) or ("", frozenset())
            if fault := fault_of(model, given, look_for_names=True):
                raise SystemExit(f"error: MODEL={model}: {fault}")
        case "address", [host]:
            print(address(host))
        case "told", arguments:
            client_tls()
            print(told(arguments).uds)
        case "url", [url]:
            print(url_of(url))
        case "awaited", things:
            pairs = [thing.partition("=") for thing in things]
            frontends = {
                name: Path(log) if log else None for name, _, log in pairs if "://" in name
            }
            logs = {name: Path(log) for name, _, log in pairs if "://" not in name}
            print(awaited(frontends, logs))
        case "shared-memory", sessions:
            print(*shared_memory({int(session) for session in sessions}), sep="\n")
        case "left", sessions:
            print(*processes_left({int(session) for session in sessions}))
        case "tries", [url, directory, *arguments]:
            print(tries(url, Path(directory), arguments))
        case _:
            parser.error(f"{options.what} is unknown, or has other arguments")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
