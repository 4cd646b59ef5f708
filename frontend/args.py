"""The frontend's command line: our flags, then every API server flag of vLLM."""

import argparse
import os
from argparse import Namespace
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from pydantic import Field
from vllm import envs
from vllm.exceptions import VLLMError

from common.cli.command_line import (
    FRONTEND,
    CommandLine,
    ConfigSettings,
    flags_of,
    read_command_line,
)
from common.cli.flag_settings import FlagSettings, Given
from common.cli.process_settings import KeySettings, ProcessSettings
from common.cli.settings_summary import summary
from common.cli.vllm_command_line import VllmParser, pass_level_on, read_vllms
from common.cli.vllm_flags import refusal_at_frontend
from common.discovery.base import Discovery
from common.discovery.settings import DiscoverySettings
from common.errors import ConfigurationError
from common.extensions import MEDIA_RULES, names_of
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.settings import NixlSettings, TransferSettings
from common.transfer.transports import TransferMode
from common.vllm_compat.features import server_arguments
from frontend.fetch import CONNECTOR_NAME, MediaSettings
from frontend.http import AccessKeys, HttpSettings, check_parsers
from frontend.processes import Plan, ProcessesSettings
from frontend.processing import ArenaSettings, PreprocessSettings
from frontend.request import FaultSettings
from frontend.router import RouterSettings


class ModelsSettings(FlagSettings):
    flag_group: ClassVar[str] = "models"

    models_from_cards: bool = Field(
        False,
        description="serve as many models as the workers have, each for as long as it has one; "
        "without it the first worker decides on the model",
    )
    max_models: int = Field(
        4, ge=1, le=256, description="models that --models-from-cards serves at the same time"
    )


class ModelCodeSettings(FlagSettings):
    flag_group: ClassVar[str] = "models"

    trust_remote_code: bool = Field(False, description="run code that comes with a model")


GROUPS: Final[tuple[type[FlagSettings], ...]] = (
    DiscoverySettings,
    ProcessSettings,
    ProcessesSettings,
    KeySettings,
    HttpSettings,
    RouterSettings,
    FaultSettings,
    MediaSettings,
    PreprocessSettings,
    ArenaSettings,
    TransferSettings,
    NixlSettings,
    ModelsSettings,
    ModelCodeSettings,
    ConfigSettings,
)
"""All settings of the frontend, except vLLM's own."""

PROG: Final = "mmrouter frontend"

ABOUT: Final = (
    "An OpenAI endpoint in front of vLLM workers. Every API server flag of `vllm serve` is "
    "accepted too; model and engine settings come from the workers."
)

VLLMS_DEFAULTS: Final[dict[str, object]] = {
    "host": "127.0.0.1",
    "port": 8000,
    "enable_prompt_tokens_details": True,  # cached tokens are what a router is for
    # Polled by probes, scrapers, launch scripts and the status page.
    "disable_access_log_for_endpoints": "/health,/livez,/ping,/metrics,/status,/mmrouter/workers,"
    "/mmrouter/workers/metrics,/mmrouter/workers/refused,/mmrouter/events,/mmrouter/decisions,/mmrouter/history,/mmrouter/summary",
    "h11_max_incomplete_event_size": 64 << 10,
    "enable_flash_late_interaction": False,  # workers share no vectors of queries
}
"""vLLM arguments with another default here, or with a default that users look up."""


@dataclass(frozen=True)
class FrontendArgs:
    """Settings from the command line and the environment.

    Attributes:
        serve: vLLM's API server arguments; its model arguments are filled in later.
        summary: settings in force and their sources, as log lines.
    """

    serve: Namespace
    access: AccessKeys
    isolate_api_keys: bool
    http: HttpSettings
    router: RouterSettings
    media: MediaSettings
    faults: FaultSettings
    preprocess: PreprocessSettings
    arena: ArenaSettings
    process: ProcessSettings
    discovery: Discovery
    transfer: TransferMode
    network: NixlNetwork
    models: ModelsSettings = field(default_factory=ModelsSettings)
    processes: int = 1
    summary: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        needs_arena = self.transfer not in (TransferMode.AUTO, TransferMode.DISABLED)
        if needs_arena and not self.arena.arena_bytes:
            raise ConfigurationError(
                f"DYNAMO_MM_TRANSFER={self.transfer.value} needs --mm-arena-gb above 0"
            )
        return Plan(
            host=self.serve.host,
            port=self.serve.port,
            uds=self.serve.uds,
            arena_bytes=0 if self.transfer is TransferMode.DISABLED else self.arena.arena_bytes,
            arena_needed=needs_arena,
        )

    @property
    def share(self) -> "FrontendArgs":
        """This process's part of the limits that all processes of the frontend divide equally."""
        if self.processes == 1:
            return self
        return replace(
            self,
            http=self.http.shared_by(self.processes),
            media=self.media.shared_by(self.processes),
            preprocess=self.preprocess.shared_by(self.processes),
        )


def parse(argv: list[str], prog: str = PROG) -> FrontendArgs:
    """Parse the command line; exit with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [flags]", description=ABOUT, allow_abbrev=False
    )
    try:
        line = read_command_line(parser, GROUPS, FRONTEND, argv)
        ours = line.ours
        serve, given = _serve_args(parser.prog, line)
        keys = KeySettings.from_args(ours)
        access = _access(serve, keys)
        return FrontendArgs(
            serve=serve,
            access=access,
            isolate_api_keys=keys.isolate_api_keys,
            http=HttpSettings.from_args(ours),
            router=RouterSettings.from_args(ours),
            media=MediaSettings.with_vllms(ours, serve),
            faults=FaultSettings.from_args(ours),
            preprocess=PreprocessSettings.from_args(ours),
            arena=ArenaSettings.from_args(ours),
            process=ProcessSettings.from_args(ours),
            discovery=DiscoverySettings.from_args(ours).open(),
            transfer=TransferSettings.from_args(ours).mode,
            network=NixlSettings.from_args(ours).network(),
            models=_models(ours, serve),
            processes=ProcessesSettings.from_args(ours).processes,
            summary=(
                *summary(ours, GROUPS, given, VLLMS_DEFAULTS),
                *(f"media rule of a package: {name}" for name in names_of(MEDIA_RULES)),
            ),
        )
    except (ConfigurationError, TypeError, ValueError, OSError, VLLMError) as error:
        parser.error(str(error))


def _serve_args(prog: str, line: CommandLine) -> tuple[Namespace, dict[str, Given]]:
    """Return vLLM's arguments and those given. Raises ConfigurationError, TypeError, ValueError."""
    parser = VllmParser(prog, flags_of(GROUPS), refusal_at_frontend)
    server_arguments().make_arg_parser(parser)
    serve, given = read_vllms(parser, line.rest, line.file)
    for name, value in VLLMS_DEFAULTS.items():
        if name not in given:
            setattr(serve, name, value)
    serve.trust_remote_code = ModelCodeSettings.from_args(line.ours).trust_remote_code
    pass_level_on(line.ours, serve)
    if min(serve.h11_max_incomplete_event_size, serve.h11_max_header_count) < 1:
        raise ConfigurationError(
            "--h11-max-incomplete-event-size and --h11-max-header-count must be 1 or more"
        )
    if not 0 <= serve.port < 1 << 16:  # the C library would take the rest of a division
        raise ConfigurationError("--port must be 0 to 65535")
    tls = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "enable_ssl_refresh", "ssl_cert_reqs")
    if not serve.ssl_certfile and (without := [name for name in tls if getattr(serve, name)]):
        raise ConfigurationError(
            f"--{without[0].replace('_', '-')} does nothing without --ssl-certfile"
        )
    try:
        _ = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE  # read where the server is made
    except ValueError as error:
        raise ConfigurationError(f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE is unusable: {error}") from error
    if "api_key" not in given and envs.VLLM_API_KEY:
        given["api_key"] = Given("environment", "VLLM_API_KEY", envs.VLLM_API_KEY)
    server_arguments().validate_parsed_serve_args(serve)
    check_parsers(serve)
    _refuse_variables()
    return serve, given


def _models(ours: Namespace, serve: Namespace) -> ModelsSettings:
    """Return the settings. Raises ConfigurationError for flags that rule out several models."""
    settings = ModelsSettings.from_args(ours)
    if not settings.models_from_cards:
        return settings
    if ProcessesSettings.from_args(ours).processes > 1:
        raise ConfigurationError(
            "--models-from-cards needs --processes=1: each process would take other models for the "
            "first ones, and refuse the rest"
        )
    if serve.served_model_name:
        raise ConfigurationError(
            "--served-model-name is of one model, and with --models-from-cards there are several: "
            "give it to the workers"
        )
    return settings


def _access(serve: Namespace, settings: KeySettings) -> AccessKeys:
    """Return the keys in force. vLLM's own check gets none: it knows only the keys of the start."""
    if not all(serve.api_key or ()):
        raise ConfigurationError(
            "--api-key is empty, which would let everybody in: leave it out if that is meant"
        )
    given = [key for key in serve.api_key or [envs.VLLM_API_KEY] if key]
    serve.api_key = [""]  # with none vLLM would take the environment's
    access = AccessKeys(given, settings)
    if settings.isolate_api_keys and access.users is None:
        raise ConfigurationError("--isolate-api-keys needs --api-key or --api-key-file")
    return access


def _refuse_variables() -> None:
    """Refuse vLLM's response store, which tenants would share, and other media connectors."""
    value = os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0")
    if value != "0":
        raise ConfigurationError(
            f"VLLM_ENABLE_RESPONSES_API_STORE={value!r} would let users read, continue and cancel "
            "each other's responses, and keep them without limit: unset it"
        )
    value = os.environ.get("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    if value != CONNECTOR_NAME:
        raise ConfigurationError(
            f"VLLM_MEDIA_CONNECTOR={value!r} would fetch what clients name without the limits of "
            "--media-allow-private and its like: unset it"
        )
