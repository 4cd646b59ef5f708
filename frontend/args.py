"""The frontend's command line: our flags, then every API server flag of vLLM."""

import argparse
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.errors import ConfigurationError
from common.settings import add_common_arguments, env_default, env_path, transfer_mode
from common.transfer.choice import TransferMode
from frontend.api_keys import read_keys
from frontend.fault_settings import FaultSettings
from frontend.fetch.settings import MediaSettings
from frontend.processing.media_processing import MOST_WAITING
from frontend.router.settings import RouterSettings


@dataclass(frozen=True)
class FrontendArgs:
    """What the command line and the environment said.

    Attributes:
        serve: vLLM's API server arguments; its model arguments are filled in later.
        arena_bytes: size of the shared-memory arena, 0 for none.
        max_inflight: requests worked on at once.
        drain_timeout_s: what requests may take to finish after SIGTERM.
        preprocess_workers: processes that process media, 0 to do it in the frontend's own.
        preprocess_queue: requests whose media may be processed, or wait for it.
    """

    serve: Namespace
    router: RouterSettings
    media: MediaSettings
    faults: FaultSettings
    discovery_dir: Path
    fleet_key_file: Path | None
    transfer: TransferMode
    arena_bytes: int
    max_inflight: int
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
        type=float,
        default=float(env_default("--mm-arena-gb", "1")),
        help="size of the shared memory through which processed media reach workers "
        "on this host; 0 sends them inline (default: %(default)s)",
    )
    parser.add_argument(
        "--max-inflight",
        type=int,
        default=int(env_default("--max-inflight", "1024")),
        help="requests worked on at once; one more is answered 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        default=env_path("--api-key-file"),
        help="file with one API key a line, in addition to --api-key",
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
    )
    serve = serve_parser.parse_args(rest)
    if serve.model_tag is not None:
        parser.error(f"unexpected argument {serve.model_tag!r}: the model comes from the workers")
    if ours.max_inflight < 1:
        parser.error(f"--max-inflight is {ours.max_inflight}; it must be at least 1")
    try:
        validate_parsed_serve_args(serve)
        serve.api_key = _api_keys(serve, ours.api_key_file)
        return FrontendArgs(
            serve=serve,
            router=RouterSettings.from_args(ours),
            media=MediaSettings.with_vllms(ours, serve),
            faults=FaultSettings.from_args(ours),
            discovery_dir=ours.discovery_dir,
            fleet_key_file=ours.fleet_key_file,
            transfer=transfer_mode(),
            arena_bytes=int(ours.mm_arena_gb * 2**30),
            max_inflight=ours.max_inflight,
            drain_timeout_s=ours.drain_timeout,
            preprocess_workers=ours.preprocess_workers,
            preprocess_queue=ours.preprocess_queue,
            nvtx=ours.nvtx,
            log_level=ours.log_level,
        )
    except (ConfigurationError, TypeError, ValueError) as error:
        parser.error(str(error))


def _api_keys(serve: Namespace, file: Path | None) -> list[str] | None:
    """All keys that users may show; None if nobody needs one."""
    keys = [key for key in serve.api_key or [envs.VLLM_API_KEY] if key]
    if file is not None:
        keys += read_keys(file)
    return keys or None


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    number.__name__ = "number"  # what argparse calls an unusable value
    return number
