"""One case from its model to its result."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from tests.families.case import Case
from tests.families.compare import compare, index_of
from tests.families.questions import questions
from tests.families.results import Answer, Result
from tests.families.stack import (
    Broken,
    Servers,
    Unbuilt,
    architecture_of,
    make_model,
    reason,
    running,
)

DEAD = "EngineCore encountered an issue"
"""What plain vLLM says when its engine has ended."""

WAYS_ASKED = ("shm", "inline", "reference")


def run(
    case: Case,
    keep: Path | None = None,
    ways: Sequence[str] = WAYS_ASKED,
    stop: Callable[..., None] | None = None,
) -> Result:
    """
    Args:
        keep: where model and logs are left; nowhere unless given.
        ways: how media travel; everything is asked for the first.
        stop: ends processes, which may take its time; waited for unless given.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mmrouter-family-") as temporary:
        directory = keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        answers: list[Answer] = []
        architecture = case.architecture
        unbuilt = broken = index = ""
        try:
            model = make_model(case.maker, directory, directory)
            architecture = architecture_of(model)
            if case.draft:
                make_model(case.draft, directory, directory)
            with (
                running(case, model, directory, ways, stop) as servers,
                httpx.Client(timeout=60) as client,
            ):
                for answer in _answers(case, servers, client):
                    answers.append(answer)
                index = index_of(servers, client)
        except Unbuilt as error:
            unbuilt = str(error)
        except (Broken, httpx.HTTPError) as error:
            broken = str(error) or type(error).__name__
        seconds = round(time.monotonic() - began, 1)
    return Result(case.name, architecture, case.mode, answers, unbuilt, broken, index, seconds)


def _answers(case: Case, servers: Servers, client: httpx.Client) -> Iterator[Answer]:
    for number, way in enumerate(servers.frontends):
        for question in questions(way, case.asked, whole=number == 0):
            answer = compare(servers, way, question, client, cached=case.alone)
            if answer.status >= 500 and DEAD in answer.said:
                raise Unbuilt(f"plain vLLM's engine ends with it: {reason(servers.plain)}")
            yield answer
            servers.check_alive()
