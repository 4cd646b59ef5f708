"""Time to the first token, of contenders that take turns."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

from tests.gpu.client import Client
from tests.gpu.results import Cost, FirstToken
from tests.gpu.server_cost import between, cost_so_far, mean
from tests.pictures import data_uri, picture

PLAIN: Final = "plain"
_QUESTION: Final = "Describe what you see."
_BLOCK: Final = 2  # new pictures of one contender, before the next has its turn


def time_first_tokens(
    contenders: Mapping[str, Client], rounds: int, pids: Mapping[str, int], side: int = 1024
) -> dict[str, FirstToken]:
    """Ask each contender about new square pictures, and about each once more.

    Args:
        contenders: plain vLLM, and frontends by the way on which their media travel. Who begins
            changes from round to round; the first round warms up and does not count.
        pids: of the contenders' first processes.

    Returns:
        Medians by contender; no time of new pictures if one of them travelled another way.
    """
    new: defaultdict[str, list[float]] = defaultdict(list)
    repeated: defaultdict[str, list[float]] = defaultdict(list)
    ways: defaultdict[str, Counter[str]] = defaultdict(Counter)
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    names = list(contenders)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for n in range(_BLOCK):
                drawn = data_uri(picture(f"{name}-{turn}-{n}", (side, side)))
                client = contenders[name]
                before = cost_so_far(pids[name])
                first_ms, response_id = client.first_token([drawn], _QUESTION)
                cost = between(before, cost_so_far(pids[name]))
                again_ms, _ = client.first_token([drawn], _QUESTION)
                if turn == 0:
                    continue
                new[name].append(first_ms)
                repeated[name].append(again_ms)
                costs[name].append(cost)
                if name != PLAIN:
                    ways[name].update(client.ways(response_id))
    return {
        name: FirstToken(
            _median(new[name]) if name == PLAIN or set(ways[name]) == {name} else None,
            _median(repeated[name]),
            len(new[name]),
            dict(ways[name]),
            mean(costs[name]),
        )
        for name in names
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)
