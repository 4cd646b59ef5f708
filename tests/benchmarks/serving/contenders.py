"""Who races. What starts them is in ``stacks.py``."""

import os
import subprocess
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
    DYNAMO = "Dynamo"


class Role(Enum):
    """What a process is to its contender.

    A worker is the process of ours, or of Dynamo's, beside an engine, without that engine. An API
    server is vLLM's.
    """

    FRONTEND = "frontend"
    WORKER = "worker"
    ROUTER = "router"
    API_SERVER = "api_server"
    ENGINE = "engine"


@dataclass(frozen=True)
class Foreign:
    """A program that is not installed with us.

    Attributes:
        variable: of the environment, which names it.
        distributions: whose versions are told, of the environment that the program is in.
    """

    variable: str
    distributions: Sequence[str]

    def missing(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Why it can't be run here; None if it can."""
        if not (program := environ.get(self.variable)):
            return f"{self.variable} does not name its program"
        if not (Path(program).is_file() and os.access(program, os.X_OK)):
            return f"{self.variable}={program} is no program"
        return None

    def program(self, environ: Mapping[str, str] = os.environ) -> str:
        """Its path."""
        return environ[self.variable]

    def versions(self) -> dict[str, str]:
        """As its environment has them."""
        python = Path(self.program()).with_name("python")
        ask = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        run = subprocess.run(
            [python, "-c", ask, *self.distributions], capture_output=True, text=True, check=False
        )
        told = run.stdout.split() if run.returncode == 0 else ["unknown"] * len(self.distributions)
        return dict(zip(self.distributions, told, strict=True))


@dataclass(frozen=True)
class Contender:
    """A way to serve a model with several engines.

    Attributes:
        flags: of the process that clients talk to.
        env: the same, environment variables.
        foreign: its program, if it is not installed with us.
    """

    name: str
    family: Family
    what: str
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    foreign: Foreign | None = None


KV: Final = "kv"
ROUND_ROBIN: Final = "round-robin"
TRANSFER_OFF: Final = "transfer-off"
NIXL: Final = "nixl"
DATA_PARALLEL: Final = "data-parallel"
CACHE_AWARE: Final = "vllm-router"
KV_AWARE: Final = "vllm-router-kv-aware"
ROUTER_IN_TURN: Final = "vllm-router-round-robin"
DYNAMO: Final = "dynamo"
DYNAMO_IN_TURN: Final = "dynamo-round-robin"

ROUTERS: Final = (CACHE_AWARE, KV_AWARE, ROUTER_IN_TURN)
"""vllm-router's policies."""

_ROUTER: Final = Foreign("BENCH_VLLM_ROUTER", ("vllm-router",))
_DYNAMO: Final = Foreign("BENCH_DYNAMO_PYTHON", ("ai-dynamo", "vllm"))
_BY_BLOCKS: Final = ("--router-mode=kv",)

TABLE: Final = (
    Contender(KV, Family.OURS, "ours", _BY_BLOCKS),
    Contender(ROUND_ROBIN, Family.OURS, "ours, in turn", ("--router-mode=round-robin",)),
    Contender(
        TRANSFER_OFF,
        Family.OURS,
        "ours, media processed by workers",
        _BY_BLOCKS,
        {"DYNAMO_DISABLE_NIXL_MM": "1"},
    ),
    Contender(NIXL, Family.OURS, "ours, by NIXL", _BY_BLOCKS, {"DYNAMO_MM_TRANSFER": "nixl"}),
    Contender(DATA_PARALLEL, Family.DATA_PARALLEL, "vLLM's own server with --data-parallel-size"),
    *(
        Contender(
            name,
            Family.VLLM_ROUTER,
            "vllm-router before vLLM's own servers",
            (f"--policy={policy}",),
            foreign=_ROUTER,
        )
        for name, policy in zip(ROUTERS, ("cache_aware", "kv_aware", "round_robin"), strict=True)
    ),
    Contender(DYNAMO, Family.DYNAMO, "Dynamo", _BY_BLOCKS, foreign=_DYNAMO),
    Contender(
        DYNAMO_IN_TURN,
        Family.DYNAMO,
        "Dynamo, in turn",
        ("--router-mode=round-robin",),
        foreign=_DYNAMO,
    ),
)


def beside(checkout: Path) -> Contender:
    """A frontend of another checkout of this project, over the workers of this one.

    Raises:
        ValueError: it is none.
    """
    if not (checkout / "frontend" / "__main__.py").is_file():
        raise ValueError(f"{checkout} is no checkout of this project")
    return Contender(
        checkout.resolve().name,
        Family.OURS,
        f"ours, of {checkout}",
        _BY_BLOCKS,
        {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"},
    )


def named(names: Sequence[str], checkouts: Sequence[Path] = ()) -> list[Contender]:
    """Contenders by their names, and those of other checkouts of this project.

    Raises:
        ValueError: there is none of that name, or two would have one.
    """
    known = {each.name: each for each in TABLE}
    for name in names:
        if name not in known:
            raise ValueError(f"no contender is called {name}: there are {', '.join(known)}")
    chosen = [known[name] for name in dict.fromkeys(names)]
    for checkout in checkouts:
        other = beside(checkout)
        if other.name in (each.name for each in chosen):
            raise ValueError(f"{checkout}: a contender is called {other.name} already")
        chosen.append(other)
    return chosen
