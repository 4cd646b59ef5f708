"""Whether all contenders answer the same: a faster one that is wrong has won nothing."""

from collections.abc import Mapping, Sequence
from typing import Final

from tests.benchmarks.serving.contenders import Family
from tests.benchmarks.serving.traffic import Load, Session, load

LOADS: Final = ("pictures-2@1", "chats@1", "text@1")
REQUESTS: Final = 4
"""Of each load. Asked one at a time: real engines round otherwise in other batches."""

NAME: Final = "answers"
"""Of the block: the same for all contenders, so all are asked the same."""

Texts = Sequence[str]


def blocks(seed: int) -> list[tuple[Load, list[Session]]]:
    """What each contender is asked."""
    return [(each, each.block(seed, 0, NAME, REQUESTS)) for each in map(load, LOADS)]


def comparable(family: Family) -> bool:
    """Whether its engines are the vLLM that we have. Another may round or draw otherwise."""
    return family is not Family.DYNAMO


def differing(texts: Mapping[str, Texts]) -> dict[str, int]:
    """How many answers of each contender differ from those of the first; none of the first."""
    first = next(iter(texts.values()), ())
    return {
        name: sum(one != other for one, other in zip(first, each, strict=True))
        for name, each in texts.items()
    }


def told(wrong: Mapping[str, int], count: int) -> str:
    """A line about it."""
    if not wrong:
        return "answers: none were compared"
    first, *others = wrong
    if not others:
        return f"answers: {first} was alone, so none were compared"
    if not any(wrong.values()):
        return f"answers: {', '.join(wrong)} gave the same {count}"
    each = ", ".join(f"{name} {number}" for name, number in wrong.items() if number)
    return f"answers: of {count}, so many differ from those of {first}: {each}"
