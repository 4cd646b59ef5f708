"""What the launch scripts need beyond a shell; no processes are started or ended here.

Standard library only, except for drawing the picture, so that asking is quick.
"""

import argparse
import base64
import io
import json
import os
import re
import shlex
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path


def get(url: str, timeout: float = 2.0) -> tuple[int, bytes]:
    """Status and body; status 0 when nobody is there, -1 when nobody answers in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except TimeoutError:
        return -1, b""
    except OSError as error:
        timed_out = isinstance(getattr(error, "reason", None), TimeoutError)
        return (-1 if timed_out else 0), b""


def port(host: str, wanted: int) -> int:
    """The wanted port if it is free, for 0 any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise SystemExit(f"port {wanted} on {host}: {error.strerror}") from None
        return probe.getsockname()[1]


def progress(url: str) -> str:
    """The state of the frontend, then the ids of the workers it knows, in one line. One that asks
    for a key does not say whom it knows.
    """
    status, body = get(f"{url}/mmrouter/workers")
    if status <= 0:
        return "busy" if status else "starting"
    if status in (401, 403):
        health, _ = get(f"{url}/health")
        return "guarded" if health == 200 else "waiting"
    workers = [str(worker["worker_id"]) for worker in json.loads(body)] if status == 200 else []
    health, _ = get(f"{url}/health")
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


def awaited(urls: list[str], logs: dict[str, Path]) -> str:
    """What is not ready yet, in one line; empty if all is.

    Args:
        urls: of frontends.
        logs: of workers, by name. One is ready if every frontend that says whom it knows has it,
            or, where none says so, if its log does.
    """
    states = [progress(url).split() for url in urls]
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


def curl(url: str) -> str:
    """A command that sends a picture to the first model served at ``url``."""
    status, body = get(f"{url}/v1/models", timeout=30)
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
    header = shlex.quote("Content-Type: application/json")
    data = shlex.quote(json.dumps(request))
    return f"curl -s {url}/v1/chat/completions -H {header} -d {data}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["port", "awaited", "shared-memory", "left", "curl"])
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    match options.what, options.arguments:
        case "port", [host, wanted]:
            print(port(host, int(wanted or 0)))
        case "awaited", things:
            urls = [thing for thing in things if "://" in thing]
            logs = dict(thing.split("=", 1) for thing in things if "://" not in thing)
            print(awaited(urls, {name: Path(log) for name, log in logs.items()}))
        case "shared-memory", sessions:
            print(*shared_memory({int(session) for session in sessions}), sep="\n")
        case "left", sessions:
            print(*processes_left({int(session) for session in sessions}))
        case "curl", [url]:
            print(curl(url))
        case _:
            parser.error(f"{options.what}: wrong number of arguments")


if __name__ == "__main__":
    # Talk to this machine directly, whatever proxy the environment names.
    os.environ["no_proxy"] = "*"
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
