"""Which versions of vLLM this is made for, what they do in different ways, and how each is met.

A way is chosen by what is there, never by a version's number: a build between two versions has some
of the changes. What a version lacks is left alone. Whatever differs is found out by
``tests/unit/test_vllm_surface.py`` and ``tests/unit/common/test_vllm_features.py``.

Imports no more of vLLM than its version: it is asked for before there is a device.
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
"""Those that this was built on and tested with. ``pyproject.toml`` installs nothing else."""

INSTALLED: Final[str] = __version__.partition("+")[0]
"""The version here, without the build's local part (``+cpu``)."""


def server_arguments() -> ModuleType:
    """vLLM's module that has its server's command line; it moved in 0.33."""
    try:
        import vllm.entrypoints.common.cli_args as cli_args
    except ModuleNotFoundError:
        import vllm.entrypoints.launchers.cli_args as cli_args
    module: ModuleType = cli_args
    return module


def count_frames_with(count: Callable[[bytes], int]) -> None:
    """Have the frames of a video be counted so, in this process, where its header does not say.

    From 0.33 on vLLM reads such a video once for that, before it chooses frames; before, it took
    the first one only.
    """
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    if hasattr(OpenCVVideoBackendMixin, "demux_count_frames"):
        OpenCVVideoBackendMixin.demux_count_frames = staticmethod(count)


def reader_of_parts() -> tuple[ModuleType, str]:
    """vLLM's module that reads the parts of a message, and the name of what does so there."""
    try:
        import vllm.renderers.chat_utils.chat_message as newer
    except ModuleNotFoundError:  # before 0.33 it was one file
        import vllm.renderers.chat_utils as older

        return older, "_parse_chat_message_content_mm_part"
    module: ModuleType = newer
    return module, "parse_chat_message_content_mm_part"


def hash_blocks_by_their_own_tokens(config: "VllmConfig") -> None:
    """Have a block's hash cover the block and what is before it, and nothing that comes after.

    From 0.33 on an engine that drafts hashes the next tokens too, and so need not compute the last
    block of a hit again. Frontends hash the whole blocks of a prompt, and nothing after them: none
    of their hashes would be found, and nothing would fail.
    """
    if getattr(config, "num_hash_lookahead_tokens", 0):
        config.speculative_config.disable_lookahead_block_hashes = True


def forget_evicted_media(renderer: "BaseRenderer") -> None:
    """Bring a worker's account of its engine's media up to date, as far as the engine has spoken.

    From 0.33 on what an engine turned out to have evicted is forgotten when something is rendered,
    which workers need never do: a picture would fail for ever. Before, it was forgotten at once.
    """
    drain = getattr(renderer, "_drain_mm_cache_invalidations", None)
    if drain is not None:
        drain()


def profiler_options(
    llm: "EngineClient", options: ProfilerOptions | None
) -> dict[str, ProfilerOptions]:
    """How to tell an engine more of a profile than its prefix and length, from 0.33 on.

    Raises OperationRefusedError: it can't be told.
    """
    if options is None:
        return {}
    if "profiler_kwargs" not in signature(llm.start_profile).parameters:
        raise OperationRefusedError("the worker's vLLM takes no profiler_kwargs")
    return {"profiler_kwargs": options}
