"""The frontend's command line: our flags, then every API server flag of vLLM."""

import argparse
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.discovery.base import Discovery
from common.errors import ConfigurationError
from common.settings import (
    add_common_arguments,
    amount,
    discovery,
    env_default,
    env_path,
    env_switch,
    nixl_network,
    transfer_mode,
)
from common.transfer.choice import TransferMode
from common.transfer.nixl_network import NixlNetwork
from frontend.fetch import MediaSettings
from frontend.http import HttpSettings, read_keys
from frontend.processing import MOST_WAITING
from frontend.request import FaultSettings
from frontend.router import RouterSettings


@dataclass(frozen=True)
class FrontendArgs:
    """What the command line and the environment said.

    Attributes:
        serve: vLLM's API server arguments; its model arguments are filled in later.
        api_keys: of users; none to let everybody in.
        admin_keys: open what only admins may see; none if they come from this host.
        arena_bytes: size of the shared-memory arena, 0 for none.
        drain_timeout_s: what requests may take to finish after SIGTERM.
        isolate_api_keys: whether no two API keys share blocks or media that are kept.
        preprocess_workers: processes that process media, 0 to do it in the frontend's own.
        preprocess_queue: requests whose media may be processed, or wait for it.
    """

    serve: Namespace
    http: HttpSettings
    api_keys: list[str]
    admin_keys: list[str]
    router: RouterSettings
    media: MediaSettings
    faults: FaultSettings
    discovery: Discovery
    fleet_key_file: Path | None
    transfer: TransferMode
    nixl: NixlNetwork
    arena_bytes: int
    isolate_api_keys: bool
    drain_timeout_s: float
    preprocess_workers: int
    preprocess_queue: int
    nvtx: bool
    log_level: str


def parse(argv: list[str]) -> FrontendArgs:
    """Parse the command line; exits with status 2 and a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m frontend",
        description="An OpenAI endpoint in front of vLLM workers.",
        epilog="Every API server flag of `vllm serve` is accepted too, for example --port, "
        "--api-key, --tool-call-parser. Model and engine settings come from the workers.",
        allow_abbrev=False,
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--mm-arena-gb",
        type=amount,
        default=env_default("--mm-arena-gb", "1"),
        help="size of the shared memory through which processed media reach workers "
        "on this host; 0 sends them inline (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        default=env_path("--api-key-file"),
        help="file with one API key a line, in addition to --api-key",
    )
    parser.add_argument(
        "--isolate-api-keys",
        action=argparse.BooleanOptionalAction,
        default=env_switch(parser, "--isolate-api-keys"),
        help="give every API key a cache_salt of its own, so that no key can find out by time "
        "what another sent, and none gains from it (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        default=env_path("--admin-key-file"),
        help="file with one key a line that opens /mmrouter/* and vLLM's management routes; "
        "without it they are open to clients on this host only",
    )
    parser.add_argument(
        "--preprocess-workers",
        type=_at_least(0),
        default=env_default("--preprocess-workers", "0"),
        metavar="N",
        help="processes that decode and process media; 0 does it in the frontend's own, on "
        "one core (default: %(default)s)",
    )
    parser.add_argument(
        "--preprocess-queue",
        type=_at_least(1),
        default=env_default("--preprocess-queue", str(MOST_WAITING)),
        metavar="N",
        help="requests whose media may be processed, or wait for it, at the same time; more "
        "are answered with 429 (default: %(default)s)",
    )
    HttpSettings.add_arguments(parser)
    RouterSettings.add_arguments(parser)
    MediaSettings.add_arguments(parser)
    FaultSettings.add_arguments(parser)
    ours, rest = parser.parse_known_args(argv)
    serve_parser = FlexibleArgumentParser(prog="python -m frontend")
    make_arg_parser(serve_parser)
    serve_parser.set_defaults(
        host="127.0.0.1",
        enable_prompt_tokens_details=True,  # cached tokens are what a router is for
        disable_access_log_for_endpoints="/health,/metrics",
        trust_remote_code=env_switch(parser, "--trust-remote-code"),
    )
    serve = serve_parser.parse_args(rest)
    if serve.model_tag is not None:
        parser.error(f"unexpected argument {serve.model_tag!r}: the model comes from the workers")
    try:
        validate_parsed_serve_args(serve)
        _refuse_stored_responses()
        api_keys = _api_keys(serve, ours.api_key_file)
        admin_keys = _admin_keys(api_keys, ours.admin_key_file)
        if ours.isolate_api_keys and not api_keys:
            parser.error("--isolate-api-keys isolates nobody without --api-key or --api-key-file")
        # vLLM's own check comes after ours, which tells users and admins apart.
        serve.api_key = api_keys + admin_keys if api_keys else None
        return FrontendArgs(
            serve=serve,
            http=HttpSettings.from_args(ours),
            api_keys=api_keys,
            admin_keys=admin_keys,
            router=RouterSettings.from_args(ours),
            media=MediaSettings.with_vllms(ours, serve),
            faults=FaultSettings.from_args(ours),
            discovery=discovery(ours),
            fleet_key_file=ours.fleet_key_file,
            transfer=transfer_mode(),
            nixl=nixl_network(ours),
            arena_bytes=int(ours.mm_arena_gb * 2**30),
            isolate_api_keys=ours.isolate_api_keys,
            drain_timeout_s=ours.drain_timeout,
            preprocess_workers=ours.preprocess_workers,
            preprocess_queue=ours.preprocess_queue,
            nvtx=ours.nvtx,
            log_level=ours.log_level,
        )
    except (ConfigurationError, TypeError, ValueError) as error:
        parser.error(str(error))


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


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    number.__name__ = "number"  # what argparse calls an unusable value
    return number
