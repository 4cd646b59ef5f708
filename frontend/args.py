"""The frontend's command line: our flags, then every API server flag of vLLM."""

import argparse
import os
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from pydantic import Field
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import VLLMError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.discovery.base import Discovery
from common.discovery.settings import DiscoverySettings
from common.errors import ConfigurationError
from common.flag_settings import FlagSettings, add_all
from common.process_settings import ProcessSettings
from common.transfer.choice import TransferMode
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.settings import NixlSettings, TransferSettings
from frontend.fetch import MediaSettings
from frontend.http import HttpSettings, KeySettings, read_keys
from frontend.processes import Plan, ProcessesSettings
from frontend.processing import ArenaSettings, PreprocessSettings
from frontend.request import FaultSettings
from frontend.router import RouterSettings


class ModelCodeSettings(FlagSettings):
    """vLLM has the flag; the variable is ours, as with all others."""

    flag_group: ClassVar[str] = "models"
    variables: ClassVar[dict[str, str]] = {"trust_remote_code": "MMROUTER_TRUST_REMOTE_CODE"}

    trust_remote_code: bool = Field(
        False,
        description="run code that comes with a model; vLLM's --trust-remote-code says so too",
    )


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
    ModelCodeSettings,
)
"""All that a user can set, but for vLLM's own."""


@dataclass(frozen=True)
class FrontendArgs:
    """What the command line and the environment said.

    Attributes:
        serve: vLLM's API server arguments; its model arguments are filled in later.
        api_keys: of users; none to let everybody in.
        admin_keys: open what only admins may see; none if they come from this host.
        network: over which NIXL may go.
        processes: how many serve together.
    """

    serve: Namespace
    api_keys: list[str]
    admin_keys: list[str]
    keys: KeySettings
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
    processes: int = 1

    @property
    def plan(self) -> Plan:
        """What a parent of several processes has to know of this."""
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
        """What one of its processes may take: of what is limited for all, as much as the others."""
        if self.processes == 1:
            return self
        return replace(
            self,
            http=self.http.shared_by(self.processes),
            media=self.media.shared_by(self.processes),
            preprocess=self.preprocess.shared_by(self.processes),
        )


def parse(argv: list[str]) -> FrontendArgs:
    """Parse the command line; exits with status 2 and a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m frontend",
        description="An OpenAI endpoint in front of vLLM workers.",
        epilog="Every API server flag of `vllm serve` is accepted too, for example --port, "
        "--api-key, --tool-call-parser. Model and engine settings come from the workers.",
        allow_abbrev=False,
    )
    add_all(parser, GROUPS)
    ours, rest = parser.parse_known_args(argv)
    try:
        serve = _serve_args(parser, rest, ModelCodeSettings.from_args(ours))
        keys = KeySettings.from_args(ours)
        api_keys = _api_keys(serve, keys.api_key_file)
        admin_keys = _admin_keys(api_keys, keys.admin_key_file)
        if keys.isolate_api_keys and not api_keys:
            parser.error("isolating API keys isolates nobody without --api-key or --api-key-file")
        # vLLM's own check comes after ours, which tells users and admins apart.
        serve.api_key = api_keys + admin_keys if api_keys else None
        return FrontendArgs(
            serve=serve,
            api_keys=api_keys,
            admin_keys=admin_keys,
            keys=keys,
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
            processes=ProcessesSettings.from_args(ours).processes,
        )
    except (ConfigurationError, TypeError, ValueError, OSError, VLLMError) as error:
        parser.error(str(error))


def _serve_args(
    parser: argparse.ArgumentParser, rest: list[str], code: ModelCodeSettings
) -> Namespace:
    """vLLM's arguments from what is left of the command line.

    Raises:
        TypeError, ValueError: vLLM, or we, don't take them together.
    """
    serve_parser = FlexibleArgumentParser(prog=parser.prog)
    make_arg_parser(serve_parser)
    serve_parser.set_defaults(
        host="127.0.0.1",
        enable_prompt_tokens_details=True,  # cached tokens are what a router is for
        disable_access_log_for_endpoints="/health,/metrics",
        trust_remote_code=code.trust_remote_code,
    )
    serve = serve_parser.parse_args(rest)
    if serve.model_tag is not None:
        parser.error(f"unexpected argument {serve.model_tag!r}: the model comes from the workers")
    validate_parsed_serve_args(serve)
    _refuse_stored_responses()
    return serve


def _api_keys(serve: Namespace, file: Path | None) -> list[str]:
    """All keys that users may show, each once; none if nobody needs one."""
    keys = [key for key in serve.api_key or [envs.VLLM_API_KEY] if key]
    if file is not None:
        keys += read_keys(file)
    return list(dict.fromkeys(keys))


def _admin_keys(api_keys: list[str], file: Path | None) -> list[str]:
    keys = [] if file is None else read_keys(file, "admin")
    if not set(keys).isdisjoint(api_keys):
        raise ConfigurationError(f"an admin key in {file} is an API key as well")
    return keys


def _refuse_stored_responses() -> None:
    """vLLM's store finds responses by an id that clients choose, whoever's they are."""
    value = os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0")
    if value != "0":
        raise ConfigurationError(
            f"VLLM_ENABLE_RESPONSES_API_STORE={value!r} would let users read, continue and cancel "
            "each other's responses, and keep them without limit: unset it"
        )
