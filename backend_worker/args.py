"""The worker's command line: our few flags, then every engine flag of vLLM."""

import argparse
import secrets
from dataclasses import dataclass
from pathlib import Path

from vllm import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.discovery.base import Discovery
from common.errors import ConfigurationError
from common.identity import Incarnation, WorkerId
from common.settings import (
    add_common_arguments,
    discovery,
    env_default,
    nixl_network,
    transfer_mode,
)
from common.transfer.choice import TransferMode
from common.transfer.nixl_network import NixlNetwork


@dataclass(frozen=True)
class WorkerArgs:
    """What the command line said.

    Attributes:
        engine: vLLM's arguments, as its own parser made them.
        engine_given: names of the engine arguments that the user gave.
        incarnation: this run of the process.
        host: address on which request plane and KV events are served.
        request_port: port of the request plane, 0 for any free one.
        max_requests: requests taken at once, 0 for four times what the engine runs.
        drain_timeout_s: what requests may take to finish after SIGTERM.
    """

    engine: AsyncEngineArgs
    engine_given: frozenset[str]
    worker_id: WorkerId
    incarnation: Incarnation
    discovery: Discovery
    fleet_key_file: Path | None
    host: str
    request_port: int
    transfer: TransferMode
    nixl: NixlNetwork
    nixl_slots: int
    nixl_slot_bytes: int
    nixl_deadline_s: float
    max_requests: int
    drain_timeout_s: float
    nvtx: bool
    log_level: str


def parse(argv: list[str]) -> WorkerArgs:
    """Parse the command line; exits with status 2 and a sentence if it is wrong."""
    incarnation = Incarnation(secrets.token_hex(8))
    parser = argparse.ArgumentParser(
        prog="python -m backend_worker",
        description="A vLLM engine behind mmrouter's frontend.",
        epilog="Every engine flag of `vllm serve` is accepted too, for example --model.",
        allow_abbrev=False,
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--worker-id",
        default=env_default("--worker-id", f"worker-{incarnation[:8]}"),
        help="name of this worker, stable over restarts if you give one",
    )
    parser.add_argument(
        "--worker-host",
        default=env_default("--worker-host", "127.0.0.1"),
        help="address on which requests and KV events are served; one that leaves this host "
        "needs --fleet-key-file (default: %(default)s)",
    )
    parser.add_argument(
        "--worker-port",
        type=int,
        default=env_default("--worker-port", "0"),
        help="port of the request plane, 0 for any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=env_default("--max-requests", "0"),
        help="requests taken at once, others are sent elsewhere; 0 for four times as many as "
        "the engine runs at once (default: %(default)s)",
    )
    parser.add_argument(
        "--nixl-slots",
        type=int,
        default=env_default("--nixl-slots", "8"),
        help="reads over NIXL that go on at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--nixl-slot-mb",
        type=int,
        default=env_default("--nixl-slot-mb", "32"),
        help="MiB that each of them takes at once; larger items come in pieces "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--nixl-deadline",
        type=float,
        default=env_default("--nixl-deadline", "10"),
        help="seconds that one NIXL read may take (default: %(default)s)",
    )
    ours, rest = parser.parse_known_args(argv)
    try:
        transfer = transfer_mode()
        nixl = nixl_network(ours)
        cards = discovery(ours)
    except ConfigurationError as error:
        parser.error(str(error))

    engine_parser = FlexibleArgumentParser(prog="python -m backend_worker")
    AsyncEngineArgs.add_cli_args(engine_parser)
    engine = engine_parser.parse_args(rest)
    # argparse can't say what was given; a parser without defaults can.
    probe = FlexibleArgumentParser(argument_default=argparse.SUPPRESS)
    AsyncEngineArgs.add_cli_args(probe)
    for action in probe._actions:
        action.default = argparse.SUPPRESS
    given = frozenset(vars(probe.parse_args(rest)))
    if "model" not in given:
        parser.error("--model is required")
    return WorkerArgs(
        engine=AsyncEngineArgs.from_cli_args(engine),
        engine_given=given,
        worker_id=WorkerId(ours.worker_id),
        incarnation=incarnation,
        discovery=cards,
        fleet_key_file=ours.fleet_key_file,
        host=ours.worker_host,
        request_port=ours.worker_port,
        transfer=transfer,
        nixl=nixl,
        nixl_slots=ours.nixl_slots,
        nixl_slot_bytes=ours.nixl_slot_mb << 20,
        nixl_deadline_s=ours.nixl_deadline,
        max_requests=ours.max_requests,
        drain_timeout_s=ours.drain_timeout,
        nvtx=ours.nvtx,
        log_level=ours.log_level,
    )
