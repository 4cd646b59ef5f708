"""What versions of vLLM do in different ways, met on the one here and on stand-ins of both."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.renderers import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM

from common.errors import OperationRefusedError
from common.vllm_compat.features import (
    forget_evicted_media,
    hash_blocks_by_their_own_tokens,
    profiler_options,
    server_arguments,
)
from tests.by_version import since_033


def test_the_servers_command_line_is_found() -> None:
    module = server_arguments()
    assert callable(module.make_arg_parser) and callable(module.validate_parsed_serve_args)
    place = since_033("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
    assert module.__name__ == place


class Cache:
    def __init__(self, *held: str) -> None:
        self.held = set(held)

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.held

    def invalidate(self, mm_hash: str) -> None:
        self.held.discard(mm_hash)


def test_what_an_engine_evicted_is_forgotten_without_rendering() -> None:
    """By vLLM's own renderer, where it forgets later; 0.32 needs no help."""
    renderer: Any = BaseRenderer.__new__(_Renderer)
    renderer.cache = Cache("seen", "evicted")
    if hasattr(BaseRenderer, "queue_mm_cache_invalidations"):
        import threading

        renderer._pending_mm_cache_invalidations = set()
        renderer._mm_cache_invalidation_lock = threading.Lock()
        renderer.queue_mm_cache_invalidations(["evicted", "never seen"])
    else:
        renderer.cache.invalidate("evicted")
    forget_evicted_media(renderer)
    assert renderer.cache.held == {"seen"}


class _Renderer(BaseRenderer):
    cache: Cache

    @property
    def mm_processor_cache(self) -> Any:
        return self.cache

    def render_messages(self, *_: Any) -> Any:
        raise NotImplementedError


def test_vllm_forgets_by_a_name_that_we_know() -> None:
    """Under another name a picture that was evicted would fail for ever, and nobody be told."""
    source = inspect.getsource(AsyncLLM._run_output_handler)
    assert since_033(".queue_mm_cache_invalidations(", ".invalidate(mm_hash)") in source
    assert hasattr(BaseRenderer, "_drain_mm_cache_invalidations") == since_033(True, False)


def test_blocks_are_hashed_by_their_own_tokens_where_engines_would_look_ahead() -> None:
    config: Any = SimpleNamespace(
        num_hash_lookahead_tokens=1,
        speculative_config=SimpleNamespace(disable_lookahead_block_hashes=False),
    )
    hash_blocks_by_their_own_tokens(config)
    assert config.speculative_config.disable_lookahead_block_hashes is True


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(speculative_config=None),
        SimpleNamespace(num_hash_lookahead_tokens=0, speculative_config=None),
        SimpleNamespace(num_hash_lookahead_tokens=0, speculative_config=SimpleNamespace()),
    ],
    ids=["older", "without drafting", "drafting without"],
)
def test_others_are_left_as_they_are(config: Any) -> None:
    drafting = config.speculative_config
    hash_blocks_by_their_own_tokens(config)
    assert config.speculative_config is drafting
    assert drafting is None or not vars(drafting)


def test_vllm_looks_ahead_by_the_names_that_we_know() -> None:
    """Under others no hash of a frontend's would be found, and nothing would fail."""
    assert hasattr(VllmConfig, "num_hash_lookahead_tokens") == since_033(True, False)
    field = "disable_lookahead_block_hashes"
    assert (field in SpeculativeConfig.__dataclass_fields__) == since_033(True, False)
    if since_033(True, False):
        asked = inspect.getsource(VllmConfig.num_hash_lookahead_tokens.fget)
        assert f"or speculative_config.{field}" in asked


class Older:
    async def start_profile(self, profile_prefix: str | None = None) -> None:
        raise NotImplementedError


class Newer:
    async def start_profile(self, *, profiler_kwargs: object = None) -> None:
        raise NotImplementedError


def test_a_profilers_options_reach_an_engine_that_takes_them() -> None:
    older: Any = Older()
    newer: Any = Newer()
    assert profiler_options(older, None) == profiler_options(newer, None) == {}
    options: dict[str, bool | int | float | str] = {"with_stack": True}
    assert profiler_options(newer, options) == {"profiler_kwargs": options}
    with pytest.raises(OperationRefusedError, match="takes no profiler_kwargs"):
        profiler_options(older, options)


def test_an_engine_here_takes_them_or_not() -> None:
    taken = inspect.signature(AsyncLLM.start_profile).parameters
    assert ("profiler_kwargs" in taken) == since_033(True, False)
