"""What the launch scripts need beyond a shell; no processes are started or ended here.

Standard library only, except for drawing the picture and reading the file of ``--config``, so that
asking is quick.
"""

import argparse
import errno
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from frontend_access import LOCKED, NOBODY, SILENT, client_tls, get, url_of
from frontend_flags import told
from what_to_paste import tries


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
            from common.vllm_compat.preflight import fault_of, model_in

            _, given = model_in([model, *arguments]) or ("", frozenset())
            if fault := fault_of(model, given, look_for_names=True):
                raise SystemExit(f"MODEL={model}: {fault}")
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
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.exit(f"error: {ended.code}")
        raise
