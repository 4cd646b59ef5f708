"""The least time that simulated engines need for a block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.fleet_traffic import Ask, BestCache
from tests.benchmarks.serving.traffic import Session, pictures_of
from tests.simgpu.gpu import GpuModel


@dataclass(frozen=True)
class Work:
    """What a block asks for.

    Attributes:
        cached_tokens: of the prompts, what one cache without limits would have held.
        pictures: different ones.
        picture_tokens: of all these together.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    pictures: int
    picture_tokens: int

    @classmethod
    def of(
        cls,
        sessions: Sequence[Session],
        best: BestCache,
        answer_tokens: int,
        picture_tokens: Callable[[str], int],
    ) -> "Work":
        """Reckon it from the prompts.

        Args:
            answer_tokens: of each answer.
            picture_tokens: of a picture, by its name.
        """
        asks: list[Ask] = [ask for session in sessions for ask in session]
        reckoned = best.best(asks)
        pictures = pictures_of(sessions)
        return cls(
            sum(prompt for prompt, _ in reckoned),
            sum(cached for _, cached in reckoned),
            answer_tokens * len(asks),
            len(pictures),
            sum(map(picture_tokens, pictures)),
        )


def bound_seconds(work: Work, gpu: GpuModel, engines: int, clients: int) -> float:
    """How long engines take that are never idle and equally loaded, and do nothing twice.

    The prompts' tokens are computed once in the whole fleet, each picture is encoded once, and each
    step gives a token to each of an engine's share of the clients. What reading the context takes
    is left out: it is less than a hundredth of a step here.
    """
    nothing = gpu.step_seconds(0, 0, 0)
    once = gpu.step_seconds(work.prompt_tokens - work.cached_tokens, work.picture_tokens, 0)
    steps = work.answer_tokens / max(1.0, clients / engines)
    return (once - nothing + steps * nothing) / engines
