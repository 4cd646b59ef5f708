"""Who races. What starts them is in ``stacks.py``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final


class Family(Enum):
    """Contenders of one family are started by one function, and share engines if they can."""

    OURS = "ours"
    DATA_PARALLEL = "data parallel"
    VLLM_ROUTER = "vllm-router"


class Role(Enum):
    """What a process is to its contender.

    A worker is the process of ours beside an engine, without that engine. An API server is vLLM's.
    """

    FRONTEND = "frontend"
    WORKER = "worker"
    ROUTER = "router"
    API_SERVER = "api_server"
    ENGINE = "engine"


@dataclass(frozen=True)
class Contender:
    """A way to serve a model with several engines.

    Attributes:
        flags: of the process that clients talk to.
        env: the same, environment variables.
        needs: the environment variable that names its program, if it is not installed with us.
    """

    name: str
    family: Family
    what: str
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None

    def missing(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Why it can't race here; None if it can."""
        if self.needs is None:
            return None
        if not (program := environ.get(self.needs)):
            return f"{self.needs} does not name its program"
        if not (Path(program).is_file() and os.access(program, os.X_OK)):
            return f"{self.needs}={program} is no program"
        return None


KV: Final = "kv"
ROUND_ROBIN: Final = "round-robin"
TRANSFER_OFF: Final = "transfer-off"
DATA_PARALLEL: Final = "data-parallel"
CACHE_AWARE: Final = "vllm-router"

TABLE: Final = (
    Contender(KV, Family.OURS, "ours", ("--router-mode=kv",)),
    Contender(ROUND_ROBIN, Family.OURS, "ours, in turn", ("--router-mode=round-robin",)),
    Contender(
        TRANSFER_OFF,
        Family.OURS,
        "ours, media processed by workers",
        ("--router-mode=kv",),
        {"DYNAMO_DISABLE_NIXL_MM": "1"},
    ),
    Contender(DATA_PARALLEL, Family.DATA_PARALLEL, "vLLM's own server with --data-parallel-size"),
    Contender(
        CACHE_AWARE,
        Family.VLLM_ROUTER,
        "vllm-router before vLLM's own servers",
        ("--policy=cache_aware",),
        needs="VLLM_ROUTER",
    ),
)


def named(names: Sequence[str]) -> list[Contender]:
    """Contenders by their names.

    Raises:
        ValueError: there is none of that name.
    """
    known = {each.name: each for each in TABLE}
    for name in names:
        if name not in known:
            raise ValueError(f"no contender is called {name}: there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
