"""What came of each call of a client, as JSON. Needs the standard library only, since programs run
in environments where there is nothing of ours."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

Outcome: TypeAlias = dict[str, object]
"""``{"answer": …}``, or ``{"raised": class, "status": …, …}``."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and what with.

    Attributes:
        url: of the server, without ``/v1``.
        model: its name there.
        key: the client shows it.
        picture: a PNG as a data URL.
        pictures: base URL of a server of pictures.
    """

    url: str
    model: str
    picture: str
    pictures: str
    key: str = "none"


Case: TypeAlias = Callable[[Endpoint], object]


class Cases:
    """The calls of one client, by name."""

    def __init__(self) -> None:
        self.table: dict[str, Case] = {}

    def __call__(self, case: Case) -> Case:
        self.table[case.__name__] = case
        return case

    def outcomes(self, endpoint: Endpoint) -> dict[str, Outcome]:
        """What comes of all of them."""
        return {name: outcome(partial(case, endpoint)) for name, case in self.table.items()}


def outcome(call: Callable[[], object]) -> Outcome:
    """What comes of a call: errors are what is looked for, so every class of them counts."""
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 # it is the outcome
        return _raised(error)
    if isinstance(answer, Coroutine):
        return outcome(lambda: asyncio.run(answer))
    # As JSON has it, so that it is the same whichever process asked. What is no JSON is an answer
    # where an error was looked for: that there is one says enough.
    return {"answer": json.loads(json.dumps(answer, default=lambda value: type(value).__name__))}


def _raised(error: Exception) -> Outcome:
    body = getattr(error, "body", None)
    detail = body.get("error", body) if isinstance(body, dict) else body
    said = {}
    if isinstance(detail, dict):
        said = {name: detail.get(name) for name in ("type", "code", "param", "message")}
    return {
        "raised": type(error).__name__,
        "status": getattr(error, "status_code", None),
        "message": str(error),
        **said,
    }


def in_turn(kinds: Iterable[str]) -> list[str]:
    """Kinds of a stream's events in their order, each run of one kind once."""
    order: list[str] = []
    for kind in kinds:
        if order[-1:] != [kind]:
            order.append(kind)
    return order


async def cancel_once(event: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Cancel a task as soon as an event has come. Returns whether that is what ended it.

    Raises what the task raises before.
    """
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        waiting.cancel()
        await task
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


def main(cases: Cases, versions: Mapping[str, str]) -> None:
    """Read endpoints by name from the standard input and print the outcomes of each."""
    endpoints = {name: Endpoint(**given) for name, given in json.load(sys.stdin).items()}
    report = {name: cases.outcomes(endpoint) for name, endpoint in endpoints.items()}
    print(json.dumps({"versions": versions, "outcomes": report}))
