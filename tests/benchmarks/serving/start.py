"""Starts all contenders of a race and waits until they serve."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.benchmarks.serving.contenders import Contender, Family
from tests.benchmarks.serving.foreign_stacks import start_dynamo, start_routers
from tests.benchmarks.serving.running import Running
from tests.benchmarks.serving.stacks import Ground, Ready, start_data_parallel, start_ours

_STARTERS: Final[Mapping[Family, Callable[[Ground, Sequence[Contender]], Ready]]] = {
    Family.OURS: start_ours,
    Family.DATA_PARALLEL: start_data_parallel,
    Family.VLLM_ROUTER: start_routers,
    Family.DYNAMO: start_dynamo,
}


async def start(ground: Ground, contenders: Sequence[Contender]) -> list[Running]:
    """Start contenders, each family with engines of its own, and wait until all serve.

    Returns:
        Them in the order of ``contenders``.
    """
    ground.fleet.start(0, 0)  # which makes the model
    coming = [
        starter(ground, some)
        for family, starter in _STARTERS.items()
        if (some := [each for each in contenders if each.family is family])
    ]
    running = [each for ready in coming for each in await ready()]
    return sorted(running, key=lambda each: contenders.index(each.contender))
