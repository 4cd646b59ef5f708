"""Readiness of the started processes, and their progress."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from common.launcher.frontend_access import LOCKED, NOBODY, SILENT, get

MAX_LOG: Final = 4 << 20
"""Bytes of a log that are read: it is read each second, and may have grown for weeks."""


def last_of(log: Path) -> bytes:
    """Return the last :data:`MAX_LOG` bytes of a log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG))
        return file.read(MAX_LOG)


class Place(NamedTuple):
    """Address of a frontend, and its log if readable."""

    url: str
    log: Path | None


def progress(url: str, log: Path | None) -> str:
    """Return the state of a frontend, then the ids of its workers, in one line. A frontend that
    needs a key or certificate does not list them."""
    status, body = get(url, "/mmrouter/workers")
    if status == LOCKED:
        served = log is None or re.search(rb"frontend\.models: serving ", last_of(log))
        return "guarded" if served else "waiting"
    if status in (NOBODY, SILENT):
        return "busy" if status == SILENT else "starting"
    health, _ = get(url, "/health")
    if status in (401, 403):
        return "guarded" if health == 200 else "waiting"
    workers = json.loads(body) if status == 200 else []
    there = [str(worker["worker_id"]) for worker in workers if worker["gone_at"] is None]
    return " ".join(["healthy" if health == 200 else "waiting", *there])


def cannot_serve(log: Path | None) -> str:
    """Return why a frontend's log says that it can't serve a model; empty if it does not."""
    said = b"" if log is None else last_of(log)
    found = re.search(rb"frontend\.models: (model .+ can't be served: .+)", said)
    return found[1].decode(errors="replace") if found else ""


STAGES: Final = (
    (rb"worker .+ serves .+ at ", "waiting until it is found"),
    (rb"KV cache size: ", "warming up"),
    (rb"Loading weights took ", "making room for its KV cache"),
    (rb"Starting to load model ", "loading weights"),
    (rb"Initializing a V1 LLM engine ", "starting its device"),
    (rb"Resolved architecture: ", "starting its engine"),
)
"""Lines of a worker's log, and the step of its start; the latest step first."""

FRONTENDS: Final = {
    "busy": "it is there and does not answer yet",
    "starting": "it does not listen yet",
    "waiting": "it has no worker yet, or loads the model's processor",
}


def stage(log: Path) -> str:
    """Return the start-up stage of a worker, by its log."""
    said = last_of(log)
    return next((doing for line, doing in STAGES if re.search(line, said)), "importing vLLM")


def awaited(frontends: Mapping[str, Place], logs: Mapping[str, Path]) -> dict[str, str]:
    """Return the processes that are not ready yet, with their progress. A worker is ready if all
    frontends that list workers list it, or without such a frontend by its log."""
    states = {name: progress(*place).split() for name, place in frontends.items()}
    telling = [known for state, *known in states.values() if state != "guarded"]
    told = {name: FRONTENDS[state] for name, (state, *_) in states.items() if state in FRONTENDS}
    for name, log in logs.items():
        doing = stage(log)
        if any(name not in known for known in telling) or (not telling and doing != STAGES[0][1]):
            told[name] = doing
    return told
