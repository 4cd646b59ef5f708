"""Access to a frontend of this machine, over TCP or a Unix socket, with or without TLS or a key.
Also the commands to paste that ask it."""

import base64
import http.client
import io
import json
import os
import re
import shlex
import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from common.cli.command_line import CommandLine, value_of
from common.cli.process_settings import KeySettings, read_keys
from common.errors import ConfigurationError

NOBODY, SILENT, LOCKED = 0, -1, -2
"""Instead of a status: nobody listens; no answer in time; a client certificate is asked for."""

CLIENT_CERT, CLIENT_KEY = "CLIENT_CERT", "CLIENT_KEY"
"""Variables that name PEM files, for frontends that ask for a client certificate."""

_REJECTED: Final = re.compile(
    "HANDSHAKE_FAILURE|UNKNOWN_CA|BAD_CERTIFICATE|CERTIFICATE_REQUIRED|CERTIFICATE_UNKNOWN"
)
"""Alerts of TLS for a client without a trusted certificate."""


class Connection(http.client.HTTPConnection):
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
    """Return a TLS context that does not verify the frontend: the script started it, and sends no
    secret. Raises ConfigurationError: the client certificate is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate := os.environ.get(CLIENT_CERT):
        try:
            context.load_cert_chain(certificate, os.environ.get(CLIENT_KEY) or None)
        except OSError as error:  # that of TLS is one
            raise ConfigurationError(
                f"{CLIENT_CERT}={certificate} can't be used: {error}; it is a PEM file, and "
                f"{CLIENT_KEY} that of its key, unless the key is in the same file"
            ) from None
    return context


def ask(
    connection: Connection, path: str, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body, and close the connection."""
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def get(
    url: str, path: str, timeout: float = 2.0, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body, over TLS if plain HTTP fails; or NOBODY, SILENT or LOCKED."""
    try:
        if not url.startswith("https:"):
            return ask(Connection(url, timeout, None), path, headers)
    except TimeoutError:
        return SILENT, b""
    except ConnectionRefusedError:
        return NOBODY, b""
    except (OSError, http.client.HTTPException):
        pass  # it speaks TLS, or nothing listens
    try:
        return ask(Connection(url, timeout, client_tls()), path, headers)
    except TimeoutError:
        return SILENT, b""
    except (OSError, http.client.HTTPException):
        return (LOCKED if is_locked(url, timeout) else NOBODY), b""


def is_locked(url: str, timeout: float) -> bool:
    """Return whether a frontend asks for a client certificate that it trusts.

    With TLS 1.3 it rejects a client after the handshake. Nothing is sent, since a reset that a
    request causes would lose the reason.
    """
    connection = Connection(url, timeout, client_tls())
    try:
        connection.connect()
        connection.sock.recv(1)
    except OSError as error:
        return isinstance(error, ssl.SSLError) and _REJECTED.search(str(error)) is not None
    finally:
        connection.close()
    return False


def over_tls(url: str, context: ssl.SSLContext) -> ssl.SSLSocket | None:
    """Connect with verification by ``context``; return None if it fails."""
    connection = Connection(url, 5.0, context)
    try:
        connection.connect()
    except OSError:
        return None
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock


def url_of(url: str) -> str:
    """Return a frontend's URL with the scheme that it speaks."""
    if not url.startswith("http:"):
        return url
    try:
        ask(Connection(url, 5.0, None), "/health")
    except (OSError, http.client.HTTPException):
        return url.replace("http:", "https:", 1)
    return url


class Trust(NamedTuple):
    """How a client can trust a frontend's certificate.

    Attributes:
        curl: flags of curl.
        note: text for people; may be empty.
        file: certificates to trust, if not the system's.
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
    """Frontends' Unix socket, and an API key with its shell expression; empty if unused."""

    uds: str = ""
    key: tuple[str, str] = ("", "")


def told(line: CommandLine) -> Told:
    """Return what clients of these frontends need. Raises ConfigurationError: a flag is the
    launcher's to set."""
    for flag in ("--host", "--port"):
        if value_of(flag, line.rest) is not None:
            raise ConfigurationError(
                f"--frontend-args has {flag}, which is the same for all: say it beside, not there"
            )
    return Told(line.of_vllm("uds") or "", _key(line))


def _key(line: CommandLine) -> tuple[str, str]:
    """Return an API key, and a shell expression for it that does not show it."""
    file: Path | None = KeySettings.from_args(line.ours).api_key_file
    if file is not None:
        pattern = shlex.quote("^[^#[:space:]]")
        return read_keys(file)[0][0], f"$(grep -m 1 {pattern} {shlex.quote(str(file.resolve()))})"
    if given := line.of_vllm("api-key"):
        return given, "$API_KEY"
    variable = os.environ.get("VLLM_API_KEY", "")
    return variable, "$VLLM_API_KEY" if variable else ""


def picture() -> str:
    """Return a small drawing as a data URI, short enough for a terminal."""
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


def tries(url: str, directory: Path, key: tuple[str, str]) -> str:
    """Return a curl command that sends a picture to the first model, and the example client's.
    Raises ConfigurationError: the frontend does not list its models."""
    bearer, shown = key
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    status, body = get(url, "/v1/models", 30, headers)
    if status == LOCKED:
        return (
            "It asks for a client certificate: name one with CLIENT_CERT=, and its key with "
            "CLIENT_KEY=, for a curl to paste here."
        )
    if status != 200:
        raise ConfigurationError(f"{url}/v1/models answered with status {status}: {body[:500]!r}")
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
    """Return the example client's command; empty if it can't be used."""
    if url.startswith("unix:") or trusted.note or os.environ.get(CLIENT_CERT):
        return []
    script = Path(__file__).parents[2] / "examples" / "send_pictures.py"
    if not script.exists():  # it comes with the repository
        return []
    environment = f'OPENAI_API_KEY="{shown}" ' if shown else ""
    command = " ".join(shlex.quote(relative(part)) for part in (sys.executable, str(script)))
    file = "" if trusted.file is None else f" --cacert {shlex.quote(str(trusted.file))}"
    call = f"{environment}{command} --stream --url {url}{file}"
    return ["Or several pictures, with the worker that answered each:", call]


def relative(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    try:
        return str(Path(path).absolute().relative_to(Path.cwd()))
    except ValueError:
        return path
