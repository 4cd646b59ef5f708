"""The worker's command line: our few flags, then every engine flag of vLLM."""

import argparse
import secrets
from argparse import Namespace
from dataclasses import dataclass
from typing import Final

from vllm import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backend_worker.settings import WorkerNixlSettings, WorkerSettings
from common.discovery.base import Discovery
from common.discovery.settings import DiscoverySettings
from common.errors import ConfigurationError
from common.flag_settings import FlagSettings, add_all
from common.identity import Incarnation, WorkerId
from common.process_settings import ProcessSettings
from common.transfer.choice import TransferMode
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.settings import TransferSettings

GROUPS: Final[tuple[type[FlagSettings], ...]] = (
    WorkerSettings,
    DiscoverySettings,
    ProcessSettings,
    TransferSettings,
    WorkerNixlSettings,
)
"""All that a user can set, but for vLLM's own."""


@dataclass(frozen=True)
class WorkerArgs:
    """What the command line and the environment said.

    Attributes:
        engine: vLLM's arguments, as its own parser made them.
        engine_given: names of the engine arguments that the user gave.
        worker_id: as given, or one that is new.
        incarnation: this run of the process.
        network: over which NIXL may go.
    """

    engine: AsyncEngineArgs
    engine_given: frozenset[str]
    worker_id: WorkerId
    incarnation: Incarnation
    worker: WorkerSettings
    process: ProcessSettings
    discovery: Discovery
    transfer: TransferMode
    nixl: WorkerNixlSettings
    network: NixlNetwork


def parse(argv: list[str]) -> WorkerArgs:
    """Parse the command line; exits with status 2 and a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m backend_worker",
        description="A vLLM engine behind mmrouter's frontend.",
        epilog="Every engine flag of `vllm serve` is accepted too, for example --model.",
        allow_abbrev=False,
    )
    add_all(parser, GROUPS)
    ours, rest = parser.parse_known_args(argv)
    incarnation = Incarnation(secrets.token_hex(8))
    try:
        worker = WorkerSettings.from_args(ours)
        nixl = WorkerNixlSettings.from_args(ours)
        engine, given = _engine_args(parser, rest)
        return WorkerArgs(
            engine=engine,
            engine_given=given,
            worker_id=WorkerId(worker.worker_id or f"worker-{incarnation[:8]}"),
            incarnation=incarnation,
            worker=worker,
            process=ProcessSettings.from_args(ours),
            discovery=DiscoverySettings.from_args(ours).open(),
            transfer=TransferSettings.from_args(ours).mode,
            nixl=nixl,
            network=nixl.network(),
        )
    except (ConfigurationError, OSError) as error:
        parser.error(str(error))


def _engine_args(
    parser: argparse.ArgumentParser, rest: list[str]
) -> tuple[AsyncEngineArgs, frozenset[str]]:
    """vLLM's arguments, and the names of those that were given."""
    if "--headless" in rest:
        parser.error(
            "--headless is for a node whose ranks another node's server serves, which a worker "
            "can't: start one on each node, with --data-parallel-hybrid-lb"
        )
    engine_parser = FlexibleArgumentParser(prog=parser.prog)
    AsyncEngineArgs.add_cli_args(engine_parser)
    engine = engine_parser.parse_args(rest)
    # argparse doesn't say what was given, but leaves alone what a namespace has already.
    missing = object()
    probe = engine_parser.parse_args(rest, Namespace(**dict.fromkeys(vars(engine), missing)))
    given = frozenset(name for name, value in vars(probe).items() if value is not missing)
    if "model" not in given:
        parser.error("--model is required")
    return AsyncEngineArgs.from_cli_args(engine), given
