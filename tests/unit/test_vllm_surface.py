"""Fails loudly when a surface of vLLM that we rely on moves."""

import inspect

from vllm import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.version import __version__

from common.card import ModelSettings
from frontend.engine_client import RoutedEngineClient
from frontend.processing.vllm_cache import StoreCache


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_the_one_that_this_was_built_on() -> None:
    assert __version__.partition("+")[0] == "0.32.0"


def test_we_implement_exactly_what_is_abstract() -> None:
    ours = {name for name in vars(RoutedEngineClient) if not name.startswith("_")}
    assert EngineClient.__abstractmethods__ <= ours
    assert ours - EngineClient.__abstractmethods__ == {"check_admission", "get_supported_tasks"}
    assert not RoutedEngineClient.__abstractmethods__


def test_generate_takes_what_vllm_passes() -> None:
    assert parameters(RoutedEngineClient.generate) == parameters(EngineClient.generate)
    assert parameters(AsyncLLM.generate) == parameters(EngineClient.generate)


def test_the_server_is_assembled_as_before() -> None:
    assert parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]


def test_media_are_injected_as_before() -> None:
    assert parameters(InputProcessor.inject_into_mm_cache) == ["self", "mm_hashes", "mm_kwargs"]


def test_a_detokenizer_is_made_and_read_as_before() -> None:
    assert parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
    assert parameters(IncrementalDetokenizer.update) == [
        "self",
        "new_token_ids",
        "stop_terminated",
    ]
    assert parameters(IncrementalDetokenizer.get_next_output_text) == ["self", "finished", "delta"]


def test_every_sampling_parameter_was_thought_about() -> None:
    """A new one may be state that an answer can't go on without: see frontend/seam.py."""
    assert len(SamplingParams.__struct_fields__) == 43


def test_the_renderer_has_the_parts_that_we_reach_into() -> None:
    source = inspect.getsource(BaseRenderer.__init__)
    for name in ("_mm_processor_cache", "_mm_processor_only_cache", "_mm_executor"):
        assert f"self.{name}" in source
    assert parameters(BaseRenderer._process_multimodal) == [
        "self",
        "prompt",
        "mm_data",
        "mm_uuids",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "skip_mm_cache",
    ]
    assert "self._process_multimodal_async(" in inspect.getsource(
        BaseRenderer._process_tokens_async
    )
    assert parameters(BaseMultiModalProcessor._call_hf_processor) == [
        "self",
        "hf_data",
        "hf_kwargs",
    ]


def test_media_are_processed_as_before() -> None:
    processor = BaseMultiModalProcessor
    assert parameters(processor._apply_hf_processor) == ["self", "inputs", "timing_ctx"]
    assert parameters(processor._get_mm_hashes) == ["self", "inputs"]
    assert "self._get_mm_hashes(" in inspect.getsource(processor._cached_apply_hf_processor)
    assert BaseMultiModalProcessorCache.__abstractmethods__ <= set(vars(StoreCache))


def test_model_settings_are_engine_arguments() -> None:
    assert set(ModelSettings.model_fields) <= set(inspect.signature(AsyncEngineArgs).parameters)
