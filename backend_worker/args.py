"""Command line of the worker: a few flags of mmrouter, then every engine flag of vLLM."""

import argparse
import secrets
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field
from vllm import AsyncEngineArgs

from backend_worker.engine.adapters import Adapters, read_adapter
from common.cli.command_line import WORKER, CommandLine, ConfigSettings, flags_of, read_command_line
from common.cli.flag_settings import FlagSettings, Given
from common.cli.process_settings import ProcessSettings
from common.cli.settings_summary import summary
from common.cli.vllm_command_line import VllmParser, pass_level_on, read_vllms
from common.cli.vllm_flags import refusal_at_worker
from common.cli.worker_settings import WorkerSettings
from common.discovery.base import Discovery
from common.discovery.settings import DiscoverySettings
from common.errors import ConfigurationError, NoDeviceError
from common.identity import Incarnation, WorkerId
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.settings import NixlSettings, TransferSettings
from common.transfer.transports import TransferMode
from common.vllm_compat.preflight import check_device, fault_of


class WorkerNixlSettings(NixlSettings):
    """Only the worker limits this memory: it is the side that reads."""

    memory_mb: int = Field(
        256,
        ge=1,
        description="memory for items that came over NIXL, until their requests give them back; "
        "the others get memory of their own",
    )


GROUPS: Final[tuple[type[FlagSettings], ...]] = (
    WorkerSettings,
    DiscoverySettings,
    ProcessSettings,
    TransferSettings,
    WorkerNixlSettings,
    ConfigSettings,
)
"""All that a user can set, but for vLLM's own."""

PROG: Final = "mmrouter worker"

ABOUT: Final = (
    "A vLLM engine behind mmrouter's frontend. Every engine flag of `vllm serve` is accepted too; "
    "the model may also be given by --model."
)


@dataclass(frozen=True)
class WorkerArgs:
    """Parsed command line and environment.

    Attributes:
        engine_given: names of the engine arguments that the user set.
        incarnation: identifies this run of the process.
        summary: effective settings and their sources, as log lines.
    """

    engine: AsyncEngineArgs
    adapters: Adapters
    engine_given: frozenset[str]
    worker_id: WorkerId
    incarnation: Incarnation
    worker: WorkerSettings
    process: ProcessSettings
    discovery: Discovery
    transfer: TransferMode
    nixl: WorkerNixlSettings
    network: NixlNetwork
    summary: tuple[str, ...] = ()


def parse(argv: list[str]) -> WorkerArgs:
    """Parse the command line. Exit with status 2 and a message if it is invalid. Exit with 1 if
    vLLM finds no device: without one vLLM can't read its own flags."""
    parser = argparse.ArgumentParser(
        prog=PROG, usage="%(prog)s MODEL [flags]", description=ABOUT, allow_abbrev=False
    )
    incarnation = Incarnation(secrets.token_hex(8))
    try:
        line = read_command_line(parser, GROUPS, WORKER, argv)
        check_device()
        ours = line.ours
        worker = WorkerSettings.from_args(ours)
        nixl = WorkerNixlSettings.from_args(ours)
        engine, given = _engine_args(parser.prog, line)
        return WorkerArgs(
            engine=AsyncEngineArgs.from_cli_args(engine),
            adapters=Adapters(engine.lora_modules),
            engine_given=frozenset(given),
            worker_id=WorkerId(worker.worker_id or f"worker-{incarnation[:8]}"),
            incarnation=incarnation,
            worker=worker,
            process=ProcessSettings.from_args(ours),
            discovery=DiscoverySettings.from_args(ours).open(),
            transfer=TransferSettings.from_args(ours).mode,
            nixl=nixl,
            network=nixl.network(),
            summary=tuple(summary(ours, GROUPS, given, {})),
        )
    except NoDeviceError as error:
        parser.exit(error.exit_status, f"{parser.prog}: error: {error}\n")
    except (ConfigurationError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


def add_vllms(parser: VllmParser) -> None:
    """Add vLLM's engine flags, and the one server flag that concerns the engine."""
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        type=read_adapter,
        default=[],
        help="LoRA adapters, each as name=path or JSON, as `vllm serve` takes them",
    )


def _engine_args(prog: str, line: CommandLine) -> tuple[Namespace, dict[str, Given]]:
    """Return vLLM's arguments and the user's. Raises ConfigurationError: invalid, or no model."""
    parser = VllmParser(prog, flags_of(GROUPS), refusal_at_worker)
    parser.add_argument("model_tag", nargs="?")  # as `vllm serve` has it
    add_vllms(parser)
    engine, given = read_vllms(parser, line.rest, line.file)
    if (tag := given.pop("model_tag", None)) is not None:
        if "model" in given and given["model"].value != tag.value:
            raise ConfigurationError(
                f"the model is {tag.value} and, by {given['model'].where}, "
                f"{given['model'].value}: give one"
            )
        engine.model = tag.value
        given["model"] = Given("flag", "MODEL", tag.value)
    if "model" not in given:
        raise ConfigurationError("MODEL or --model is required")
    if (fault := fault_of(engine.model, given)) is not None:
        raise ConfigurationError(fault)
    for name in ("tokenizer", "hf_config_path"):
        place = getattr(engine, name) or ""
        if place.startswith(("/", "./", "../", "~")) and not Path(place).exists():
            raise ConfigurationError(f"--{name.replace('_', '-')}: there is no {place}")
    pass_level_on(line.ours, engine)
    engine.otlp_traces_endpoint = ProcessSettings.from_args(line.ours).otlp_traces_endpoint
    return engine, given
