"""Supported versions of vLLM, and their differences.

Behaviour is chosen by feature detection, never by version number: a build between two versions has
some of the changes. A missing feature is left alone. ``tests/unit/test_vllm_surface.py`` and
``tests/unit/common/test_vllm_features.py`` detect differences.

Imports only vLLM's version: it is needed before there is a device.
"""

from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Final

from vllm.version import __version__

from common.errors import OperationRefusedError
from common.request_plane.operations import ProfilerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient
    from vllm.renderers import BaseRenderer

SUPPORTED: Final = ("0.32.0", "0.33.0")
"""Supported versions of vLLM. ``pyproject.toml`` installs no others."""

BUILD: Final[str] = __version__

INSTALLED: Final = BUILD.partition("+")[0]
"""The version here, without the build's local part (``+cpu``)."""


def server_arguments() -> ModuleType:
    """Return vLLM's module with its server's command line; it moved in 0.33."""
    try:
        import vllm.entrypoints.common.cli_args as cli_args
    except ModuleNotFoundError:
        import vllm.entrypoints.launchers.cli_args as cli_args
    module: ModuleType = cli_args
    return module


def count_frames_with(count: Callable[[bytes], int]) -> None:
    """Count a video's frames by ``count`` where its header doesn't say: vLLM 0.33 reads the video
    once for that, without a time-out."""
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    if hasattr(OpenCVVideoBackendMixin, "demux_count_frames"):
        OpenCVVideoBackendMixin.demux_count_frames = staticmethod(count)


def reader_of_parts() -> tuple[ModuleType, str]:
    """Return vLLM's module that reads the parts of a message, and the function's name."""
    try:
        import vllm.renderers.chat_utils.chat_message as newer
    except ModuleNotFoundError:  # before 0.33 it was one file
        import vllm.renderers.chat_utils as older

        return older, "_parse_chat_message_content_mm_part"
    module: ModuleType = newer
    return module, "parse_chat_message_content_mm_part"


def hash_blocks_by_their_own_tokens(config: "VllmConfig") -> None:
    """Hash blocks without lookahead: a block's hash covers only the block and its predecessors.
    From 0.33 on a drafting engine hashes the next tokens too, to avoid recomputing the last block
    of a hit. Frontends hash whole blocks only: none of their hashes would match, without any error.
    """
    if getattr(config, "num_hash_lookahead_tokens", 0):
        config.speculative_config.disable_lookahead_block_hashes = True


def forget_evicted_media(renderer: "BaseRenderer") -> None:
    """Apply the evictions that the engine has reported so far. From 0.33 on vLLM applies them when
    it renders, which workers may never do: a picture would fail for ever. Earlier versions applied
    them at once."""
    drain = getattr(renderer, "_drain_mm_cache_invalidations", None)
    if drain is not None:
        drain()


def profiler_options(
    llm: "EngineClient", options: ProfilerOptions | None
) -> dict[str, ProfilerOptions]:
    """Return a profile's options (vLLM 0.33). Raises OperationRefusedError: unsupported."""
    if options is None:
        return {}
    if "profiler_kwargs" not in signature(llm.start_profile).parameters:
        raise OperationRefusedError("the worker's vLLM takes no profiler_kwargs")
    return {"profiler_kwargs": options}
