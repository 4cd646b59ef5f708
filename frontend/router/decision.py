"""Routing decisions and their reasons, kept for inspection as JSON and completed by the outcome."""

from collections import deque
from typing import NamedTuple

import msgspec

from common.identity import Incarnation, MmHash, RequestId, Target, WorkerId
from frontend.router.index import Knowledge
from frontend.router.selection import TargetLoad, Work, parts_of_cost

CLIENT_ID_LENGTH = 256
"""Characters of a client's id that are kept: it may be as long as a body may be."""


class Considered(NamedTuple):
    """A candidate with its load at decision time; the cost is in tokens of the fleet's median
    worker.
    """

    target: Target
    knowledge: Knowledge
    work: Work
    load: TargetLoad
    cost: float
    pace: float
    first_token_ms: float | None

    def as_json(self) -> dict[str, object]:
        return {
            "worker_id": self.target.worker_id,
            "rank": self.target.rank,
            "index": self.knowledge.value,
            **self.work._asdict(),
            "active": self.load.active,
            "waiting": self.load.waiting,
            "queued_prefill_tokens": self.load.prefill_tokens,
            "decode_tokens": self.load.decode_tokens,
            "cost": self.cost,
            "costs": parts_of_cost(self.work, self.load, self.pace)._asdict(),
            "first_token_s": None if self.first_token_ms is None else self.first_token_ms / 1e3,
        }


class MediaMove(msgspec.Struct, frozen=True, gc=False):
    """How one media item reached the worker; ``transport`` is empty if nothing moved."""

    mm_hash: MmHash
    how: str
    nbytes: int
    transport: str


class Decision(msgspec.Struct):
    """One routing decision.

    Attributes:
        client_id: id chosen by the client, not unique; prefix of the API's response id. Cut after
            :data:`CLIENT_ID_LENGTH` characters.
        time: seconds since the epoch.
        micros: duration of the decision in microseconds, hashing included.
        considered: the cheapest candidates, of ``candidates_total``.
        prefill_tokens: load on the target until the first output, media included.
        realised_cached_tokens: as the engine reported them.
        predicted_first_token_s: seconds from the decision; None if too little is known.
    """

    request_id: RequestId
    worker_id: WorkerId
    rank: int
    mode: str
    reason: str
    index: str
    time: float
    micros: float
    prompt_tokens: int
    prompt_blocks: int
    overlap_blocks: int
    predicted_cached_tokens: int
    considered: list[Considered]
    candidates_total: int
    realised_cached_tokens: int | None = None
    media: list[MediaMove] = msgspec.field(default_factory=list)
    client_id: str = ""
    incarnation: Incarnation = Incarnation("")
    prefill_tokens: int = 0
    first_token_s: float | None = None
    predicted_first_token_s: float | None = None
    work: Work = Work(0, 0, 0, 0)

    @property
    def target(self) -> Target:
        return Target(self.worker_id, self.rank)

    def as_json(self, candidates: int | None = None) -> dict[str, object]:
        """Return builtins under the client's id: the cheapest candidates and the chosen one."""
        built: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(self, considered=[]))
        built["request_id"] = built.pop("client_id")
        del built["considered"], built["work"]
        shown = self.considered[:candidates]
        shown += [one for one in self.considered[len(shown) :] if one.target == self.target]
        return built | {"candidates": [one.as_json() for one in shown]}


class DecisionLog:
    """Bounded log, oldest first: by default some megabytes, and minutes of a busy frontend."""

    def __init__(self, capacity: int = 1000) -> None:
        self._decisions: deque[Decision] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def find(self, response_id: str) -> list[Decision]:
        """Return the decisions for an API response, oldest first: a response may have several
        requests, with suffixed ids, and clients may reuse ids.
        """
        prefix = response_id[:CLIENT_ID_LENGTH]
        return [one for one in self._decisions if one.client_id.startswith(prefix)]

    def last(self, count: int | None = None) -> list[Decision]:
        newest_first = list(reversed(self._decisions))
        return newest_first if count is None else newest_first[:count]
