"""What came out of a case, in a file for each."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tests.families.questions import OTHERS, Medium


class Answer(msgspec.Struct, frozen=True):
    """What two servers said to one question.

    Attributes:
        way: how media travelled to our worker.
        differs: in what, empty if both are the same.
        status: of the plain vLLM's answer.
        ours: of ours.
        said: its text, or its refusal.
        cached, prompt: tokens, of ours.
    """

    way: str
    medium: Medium
    question: str
    differs: list[str]
    status: int
    ours: int
    said: str
    cached: int = 0
    prompt: int = 0


class Result(msgspec.Struct, frozen=True):
    """One case.

    Attributes:
        architecture: of the model.
        mode: what is special about the engine; empty in a row of the table of architectures.
        unbuilt: why there is nothing to compare, else empty.
        broken: what went wrong with our side as a whole, else empty.
        index: how far the frontend knew the worker's cache at the end.
    """

    case: str
    architecture: str
    mode: str
    answers: list[Answer] = []
    unbuilt: str = ""
    broken: str = ""
    index: str = ""
    seconds: float = 0.0

    @property
    def differing(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.differs]

    @property
    def differs(self) -> bool:
        return bool(self.broken or self.differing)

    def follows(self, medium: Medium) -> bool:
        """Whether another medium gets another answer, where both were asked."""
        said = {
            each.question: each.said
            for each in self.answers
            if each.way == self.answers[0].way and each.question in OTHERS.get(medium, ())
        }
        return len(said) < 2 or len(set(said.values())) > 1


class Summary(msgspec.Struct, frozen=True):
    """All cases in four figures, and the last line of a run.

    Attributes:
        architectures: those of vLLM's registry that were compared with plain vLLM.
        cases: questions that were asked of both.
        differ: cases in which something differs.
        unbuildable: architectures of vLLM's registry without a tiny model.
    """

    architectures: int
    cases: int
    differ: int
    unbuildable: int


def summary(results: Iterable[Result], registry: Mapping[str, str]) -> Summary:
    """
    Args:
        registry: for each architecture of vLLM's registry why it can't be built, or nothing.
    """
    results = list(results)
    compared = {result.architecture for result in results if result.answers and not result.unbuilt}
    failed = {result.architecture for result in results if result.unbuilt} - compared
    return Summary(
        architectures=len(compared & registry.keys()),
        cases=sum(len(result.answers) for result in results),
        differ=sum(len(result.differing) + bool(result.broken) for result in results),
        unbuildable=sum(bool(why) or name in failed for name, why in registry.items()),
    )


def path_of(case: str, directory: Path) -> Path:
    return directory / f"{case}.json"


def read(case: str, directory: Path) -> Result | None:
    """None if it has not been run yet."""
    try:
        return msgspec.json.decode(path_of(case, directory).read_bytes(), type=Result)
    except FileNotFoundError:
        return None


def write(result: Result, directory: Path) -> None:
    """Complete or not at all, so that a run can be stopped anywhere."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(result.case, directory)
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    beside.rename(path)
