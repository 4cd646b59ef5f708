"""Commands to print for pasting: requests to the started frontend."""

import base64
import io
import json
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ConfigurationError
from common.launcher.frontend_access import CLIENT_CERT, CLIENT_KEY, LOCKED, Trust, get, trust


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
