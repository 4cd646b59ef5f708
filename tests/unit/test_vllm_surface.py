"""Fails loudly when a surface of vLLM that we rely on moves."""

import ast
import dataclasses
import inspect
import pickle
import textwrap
import threading
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute
from packaging.requirements import Requirement
from pydantic import BaseModel
from vllm import AsyncEngineArgs
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ZmqEventPublisher,
)
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.model_executor import models
from vllm.multimodal import image
from vllm.multimodal.audio import resample_audio_torchaudio
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalFlatField
from vllm.multimodal.media import (
    AudioMediaIO,
    ImageMediaIO,
    MediaConnector,
    MediaIO,
    VideoMediaIO,
    audio,
)
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.video_decoders import opencv, torchcodec
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor

from common.media.formats import IMAGE_FORMATS
from common.request_plane.card import ModelSettings
from common.vllm_compat.features import INSTALLED, SUPPORTED
from frontend.args import parse
from frontend.fetch import MediaLoader
from frontend.fetch.connector import FrontendMediaConnector
from frontend.fetch.content import decoding_mode
from frontend.http.access.admin import is_for_admins
from frontend.http.operator.vllm_routes import MANAGEMENT
from frontend.processing.renderer_processing import StoreCache
from frontend.request.engine_client import RoutedEngineClient
from tests.by_version import since_033

ROOT = Path(__file__).parents[2]
OPENAI = "vllm.entrypoints.openai"


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_the_one_that_this_was_built_on() -> None:
    assert INSTALLED in SUPPORTED


def test_the_project_installs_the_versions_that_are_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {name: Requirement(extras[name][0]) for name in ("cpu", "cuda", "cuda-0.33")}
    assert {each.operator for one in asked.values() for each in one.specifier} == {"=="}
    versions = {name: each.version for name, one in asked.items() for each in one.specifier}
    oldest, newest = SUPPORTED
    assert versions == {"cpu": oldest, "cuda": oldest, "cuda-0.33": newest}


def test_we_implement_exactly_what_is_abstract() -> None:
    ours = {name for name in vars(RoutedEngineClient) if not name.startswith("_")}
    assert EngineClient.__abstractmethods__ <= ours
    assert ours - EngineClient.__abstractmethods__ == {"check_admission", "get_supported_tasks"}
    assert not RoutedEngineClient.__abstractmethods__


@pytest.mark.parametrize("name", sorted(EngineClient.__abstractmethods__))
def test_each_method_takes_what_vllm_passes(name: str) -> None:
    theirs = getattr(EngineClient, name)
    if not isinstance(theirs, property):
        ours = parameters(getattr(RoutedEngineClient, name))
        newer = since_033(set(), {"profiler_kwargs"})
        assert [each for each in ours if each not in newer] == parameters(theirs)


def test_an_engine_generates_from_what_vllm_passes() -> None:
    assert parameters(AsyncLLM.generate) == parameters(EngineClient.generate)


def test_the_server_is_assembled_as_before() -> None:
    assert parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]


OF_USERS = {
    "/tokenizer_info",
    "/detokenize",
    "/generative_scoring",
    "/health",
    "/inference/v1/generate",
    "/invocations",
    "/load",
    "/metrics",
    "/ping",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/models",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/systemone",
    "/version",
}


def test_every_route_is_for_users_or_for_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one of vLLM's: may every user call it? If not, it belongs into http/vllm_routes.py."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    args = parse([]).serve
    args.enable_fault_tolerance = True
    args.enable_tokenizer_info_endpoint = True  # vLLM keeps it for good once any app had it
    app = build_app(args, ("generate",), None)
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
    of_users = OF_USERS | since_033({"/v1/decisions"}, set())
    assert {path for path in paths if not is_for_admins(path)} == of_users
    ours = {f"/{name}" for name in MANAGEMENT}
    # The profiler's are there if there is one.
    unknown = {name for name in ours if not any(path.startswith(name) for path in paths)}
    assert unknown == {"/start_profile", "/stop_profile"}


def test_media_are_injected_as_before() -> None:
    assert parameters(InputProcessor.inject_into_mm_cache) == ["self", "mm_hashes", "mm_kwargs"]


def test_blocks_are_hashed_of_what_they_were() -> None:
    """Something else in them, and every hash is another: then nothing fails, and no block is ever
    found. See frontend/router/hashing/."""
    # Whose number is 0 in our workers, see common/vllm_compat/features.py.
    ahead = since_033(["num_hash_lookahead_tokens"], [])
    assert parameters(get_request_block_hasher) == ["hash_block_size", "caching_hash_fn", *ahead]
    assert parameters(hash_block_tokens) == [
        "hash_function",
        "parent_block_hash",
        "curr_block_token_ids",
        "extra_keys",
    ]


def test_every_field_of_an_event_was_thought_about() -> None:
    """Ours ignore what they don't know: see frontend/router/event_wire.py."""
    assert BlockStored.__struct_fields__ == (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        *since_033(["lookahead_token_ids"], []),
    )
    assert BlockRemoved.__struct_fields__ == (
        "block_hashes",
        "medium",
        "group_idx",
        "locality",
        "ownership",
    )
    assert AllBlocksCleared.__struct_fields__ == ()


def test_vllms_event_publisher_is_what_ours_was_made_from() -> None:
    """``backend_worker/kv_events/event_publisher.py`` has a loop of its own in place of vLLM's."""
    assert parameters(ZmqEventPublisher.__init__) == [
        "self",
        "data_parallel_rank",
        "endpoint",
        "replay_endpoint",
        "buffer_steps",
        "hwm",
        "max_queue_size",
        "topic",
    ]
    begin = inspect.getsource(ZmqEventPublisher.__init__)
    assert begin.index("self._buffer = deque[tuple[int, bytes]](maxlen=buffer_steps)") > 0
    assert begin.index("self._socket_setup()") < begin.index("self._seq_gen = count()")
    assert "target=self._publisher_thread" in begin
    loop = textwrap.dedent(inspect.getsource(ZmqEventPublisher._publisher_thread))
    relied_on = (
        "self._pack = msgspec.msgpack.Encoder()",
        "while self._running or self._event_queue.qsize() > 0:",
        "if self._replay is not None and self._replay.poll(0):",
        "self._service_replay()",
        "if event is None:",
        "seq = next(self._seq_gen)",
        'seq_bytes = seq.to_bytes(8, "big")',
        "self._pub.send_multipart((self._topic_bytes, seq_bytes, payload))",
        "self._buffer.append((seq, payload))",
        "self._event_queue.task_done()",
    )
    places = [loop.index(line) for line in relied_on]
    assert places == sorted(places)
    answer = inspect.getsource(ZmqEventPublisher._service_replay)
    assert "client_id, _, start_seq_bytes = frame" in answer
    assert '(client_id, b"", self._topic_bytes, seq.to_bytes(8, "big"), buf)' in answer
    assert 'send_multipart((client_id, b"", b"", self.END_SEQ, b""))' in answer
    assert ZmqEventPublisher.END_SEQ == b"\xff" * 8
    setup = inspect.getsource(ZmqEventPublisher._socket_setup)
    assert "self._ctx.socket(zmq.ROUTER)" in setup
    assert "self._pub.set_hwm(self._hwm)" in setup


def test_a_detokenizer_is_made_and_read_as_before() -> None:
    assert parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
    assert parameters(IncrementalDetokenizer.update) == [
        "self",
        "new_token_ids",
        "stop_terminated",
    ]
    assert parameters(IncrementalDetokenizer.get_next_output_text) == ["self", "finished", "delta"]


def test_every_sampling_parameter_was_thought_about() -> None:
    """A new one may be state that an answer can't go on without: see frontend/request/resume.py."""
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
    assert parameters(BaseMultiModalProcessor._get_hf_mm_inputs) == [
        "self",
        "mm_items",
        "hf_kwargs",
    ]


def test_all_models_sort_media_before_they_call_the_hf_processor() -> None:
    """That is where its runs are counted, since many call it in ways of their own."""
    ways = [
        (path, node)
        for path in Path(inspect.getfile(models)).parent.glob("*.py")
        if "def _apply_hf_processor_main" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_apply_hf_processor_main"
    ]
    assert ways
    ways.append(_base_way())
    for path, node in ways:
        assert ast.unparse(node).count("self._get_hf_mm_inputs(") == 1, path


def _base_way() -> tuple[Path, ast.FunctionDef]:
    source = textwrap.dedent(inspect.getsource(BaseMultiModalProcessor._apply_hf_processor_main))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return Path(inspect.getfile(BaseMultiModalProcessor)), node


def test_media_are_processed_as_before() -> None:
    processor = BaseMultiModalProcessor
    assert parameters(processor._apply_hf_processor) == ["self", "inputs", "timing_ctx"]
    assert parameters(processor._get_mm_hashes) == ["self", "inputs"]
    assert "self._get_mm_hashes(" in inspect.getsource(processor._cached_apply_hf_processor)
    # What is made is looked at before any cache has it.
    updates = ["self", "mm_items", "hf_processor_mm_kwargs", "out_mm_kwargs"]
    assert parameters(processor._get_mm_prompt_updates) == updates
    for way in (processor._apply_hf_processor, processor._cached_apply_hf_processor):
        assert "self._get_mm_prompt_updates(" in inspect.getsource(way).split("self._merge_mm")[0]
    for path in Path(models.__path__[0]).rglob("*.py"):
        assert "def _get_mm_prompt_updates(" not in path.read_text(), path
    assert BaseMultiModalProcessorCache.__abstractmethods__ <= set(vars(StoreCache))
    dummies = ["self", "seq_len", "mm_counts", "mm_options"]
    assert parameters(processor.get_dummy_inputs) == dummies
    assert [each.name for each in dataclasses.fields(MultiModalFlatField)][-2:] == ["slices", "dim"]


def test_names_of_media_reach_what_hashes_them() -> None:
    assert "mm_uuid_items" in {field.name for field in dataclasses.fields(ProcessorInputs)}
    assert 'prompt.get("multi_modal_uuids")' in inspect.getsource(
        BaseRenderer._process_tokens_async
    )


@pytest.mark.parametrize(
    "request_type",
    [
        AnthropicMessagesRequest,
        BatchChatCompletionRequest,
        ChatCompletionRequest,
        CompletionRequest,
        GenerateRequest,
        ResponsesRequest,
        *map(resolve_name, since_033([f"{OPENAI}.decisions.protocol:DecisionRequest"], [])),
    ],
)
def test_salts_come_in_bodies_under_one_name(request_type: type[BaseModel]) -> None:
    assert request_type.model_fields["cache_salt"].validation_alias is None


def test_model_settings_are_engine_arguments() -> None:
    assert set(ModelSettings.model_fields) <= set(inspect.signature(AsyncEngineArgs).parameters)


def test_a_connector_is_made_of_what_it_was() -> None:
    """Ours takes whatever comes, and ignores it: see frontend/fetch/connector.py."""
    assert parameters(MediaConnector.__init__) == [
        "self",
        "media_io_kwargs",
        "connection",
        "allowed_local_media_path",
        "allowed_media_domains",
        *since_033(["decoded_budget", "download_budget"], []),
    ]


def test_what_a_connector_inherits_finds_all_its_attributes() -> None:
    """Ours doesn't set itself up as vLLM's does."""
    ours = FrontendMediaConnector(cast(MediaLoader, None))
    inherited = (
        method
        for name, method in vars(MediaConnector).items()
        if name.startswith(("fetch_", "_image_io")) and name not in vars(FrontendMediaConnector)
    )
    read = {name for method in inherited for name in attributes_of_self(method)}
    assert read >= {"load_from_url_async", "media_io_kwargs"}
    assert {name for name in read if not hasattr(ours, name)} == set()


def attributes_of_self(method: object) -> set[str]:
    source = textwrap.dedent(inspect.getsource(method))  # type: ignore[arg-type]
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
async def test_how_a_medium_is_decoded_has_a_key(kind: str) -> None:
    """Without, nothing fails, and each medium is decoded and processed for each request anew."""
    asked: list[MediaIO[Any]] = []

    class Asked(FrontendMediaConnector):
        async def load_from_url_async(
            self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
        ) -> None:
            asked.append(media_io)

    for _ in range(2):
        # From 0.33 on vLLM has two for each request, which hold locks.
        budgets: Any = {"decoded_budget": threading.Condition(), "download_budget": object()}
        connector = Asked(cast(MediaLoader, None), **since_033(budgets, {}))
        await getattr(connector, f"fetch_{kind}_async")("https://example.com/x")
    media_io, of_another_request = asked
    assert isinstance(media_io, (AudioMediaIO, ImageMediaIO, VideoMediaIO))
    assert decoding_mode(media_io) is not None
    assert decoding_mode(media_io) == decoding_mode(of_another_request)
    pickle.dumps(media_io)  # decoded in another process, perhaps


def test_decoders_are_where_they_are_guarded() -> None:
    """See common/media/decoder_guard.py and frontend/fetch/video_limit.py."""
    assert "av.open(path)" in inspect.getsource(audio.load_audio_pyav)
    assert "AudioDecoder is None" in inspect.getsource(audio.load_audio_torchcodec)
    assert "_get_torchaudio_resampler(" in inspect.getsource(resample_audio_torchaudio)
    assert "VideoDecoder(" in inspect.getsource(
        torchcodec.TorchCodecVideoBackendMixin.make_torchcodec_decoder
    )
    assert "formats=ALLOWED_IMAGE_FORMATS" in inspect.getsource(image.open_image)
    assert "open_image(" in inspect.getsource(ImageMediaIO.load_bytes)
    assert set(IMAGE_FORMATS) <= set(image.ALLOWED_IMAGE_FORMATS)
    assert audio.AUDIO_BACKENDS == ("auto", "soundfile", "pyav", "torchcodec")
    assert "loader_cls.read_frames(" in inspect.getsource(opencv.decode_opencv)
    # Ours does the same, for fewer bytes.
    last = since_033("_load_with_budget", "load_bytes")
    source = inspect.getsource(AudioMediaIO.load_bytes)
    source += inspect.getsource(getattr(AudioMediaIO, last))
    for part in ("_validate_encoded_size(", "sr=None", "backend=self.audio_backend"):
        assert part in source
