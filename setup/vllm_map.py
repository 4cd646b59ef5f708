"""Where the project touches vLLM: ``python setup/vllm_map.py FILE`` writes it into a page.

``VALUES`` are types that any file may import. ``SURFACES`` are the rest, which vLLM moves from
version to version: each names its files, and for each file the modules that it may import. What the
page says is read from the imports themselves; what stands here says how they are grouped, and that
someone has thought about each. ``tests/unit/test_vllm_map.py`` fails when the two part.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from setup import replaced_names

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("backend_worker", "common", "frontend")

BEGIN: Final = "<!-- Made by `make docs` from the imports and setup/vllm_map.py: change those. -->"
END: Final = "<!-- End of what is made. -->"

VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.exceptions": (
        "GenerationError",
        "GracefulHTTPError",
        "LoRAAdapterNotFoundError",
        "RetryableRequestError",
        "VLLMClientError",
        "VLLMError",
        "VLLMUnprocessableEntityError",
        "VLLMValidationError",
    ),
    "vllm.inputs": (
        "EncoderDecoderInput",
        "EngineInput",
        "PromptType",
        "embeds_input",
        "mm_input",
        "tokens_input",
    ),
    "vllm.logprobs": ("FlatLogprobs", "Logprob"),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.multimodal.inputs": ("MultiModalFeatureSpec", "MultiModalKwargsItem", "PlaceholderRange"),
    "vllm.multimodal.media": ("MediaIO",),
    "vllm.outputs": (
        "CompletionOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
    ),
    "vllm.pooling_params": ("PoolingParams",),
    "vllm.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "vllm.tasks": ("SupportedTask",),
    "vllm.tokenizers": ("TokenizerLike",),
}
"""Types of what goes in and comes out, and two interfaces that are passed on: module -> names."""

SURFACES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "server assembly": {
        "frontend/http/error_shapes.py": ("vllm.entrypoints.serve.exception_handling.utils",),
        "frontend/http/server/vllm_server.py": (
            "vllm.entrypoints.launchers.api_server.app_state",
            "vllm.entrypoints.launchers.app",
            "vllm.entrypoints.launchers.launcher",
            "vllm.entrypoints.launchers.utils.server_utils",
            "vllm.entrypoints.serve.exception_handling.handlers.vllm_error",
            "vllm.entrypoints.serve.middleware.x_request_id",
            "vllm.envs",
        ),
        "frontend/http/server/serving_threads.py": (
            "vllm.entrypoints.openai.parser.harmony_utils",
            "vllm.envs",
            "vllm.multimodal.processing",
        ),
        "frontend/http/server/tools.py": ("vllm.reasoning", "vllm.tool_parsers"),
    },
    "command line": {
        "backend_worker/args.py": ("vllm",),
        "common/cli/vllm_command_line.py": ("vllm.logger", "vllm.utils.argparse_utils"),
        "frontend/args.py": ("vllm.envs",),
    },
    "what versions do in different ways": {
        "common/vllm_compat/features.py": (
            "vllm.config",
            "vllm.engine.protocol",
            "vllm.entrypoints.common.cli_args",
            "vllm.entrypoints.launchers.cli_args",
            "vllm.multimodal.video_decoders.opencv",
            "vllm.renderers",
            "vllm.renderers.chat_utils",
            "vllm.renderers.chat_utils.chat_message",
            "vllm.version",
        ),
    },
    "bodies of errors": {
        "frontend/asgi.py": ("vllm.entrypoints.serve.engine.protocol",),
    },
    "events of streams": {
        "frontend/http/streaming/merging.py": ("vllm.utils.async_utils",),
        "frontend/http/streaming/token_streams.py": (
            "vllm.entrypoints.generate.base.protocol",
            "vllm.entrypoints.generate.beam_search.online",
            "vllm.entrypoints.openai.chat_completion.batch_serving",
            "vllm.entrypoints.openai.chat_completion.protocol",
            "vllm.entrypoints.openai.chat_completion.serving",
            "vllm.entrypoints.openai.completion.protocol",
            "vllm.entrypoints.openai.completion.serving",
            "vllm.entrypoints.scale_out.token_in_token_out.mm_serde",
            "vllm.entrypoints.scale_out.token_in_token_out.protocol",
            "vllm.entrypoints.scale_out.token_in_token_out.serving",
            "vllm.entrypoints.serve.utils.sse_keep_alive",
            "vllm.parser.abstract_parser",
            "vllm.sampling_params",
        ),
        "frontend/http/streaming/parsing.py": (
            "vllm.entrypoints.generate.base.protocol",
            "vllm.entrypoints.openai.chat_completion.serving",
            "vllm.parser.abstract_parser",
        ),
        "frontend/http/streaming/stream_errors.py": (
            "vllm.entrypoints.anthropic.serving",
            "vllm.entrypoints.openai.responses.context",
            "vllm.entrypoints.openai.responses.protocol",
            "vllm.entrypoints.openai.responses.serving",
            "vllm.entrypoints.serve.engine.protocol",
            "vllm.parser.abstract_parser",
        ),
    },
    "tokenizing of long texts": {
        "frontend/processing/tokenizing.py": (
            "vllm.inputs",
            "vllm.renderers",
            "vllm.tokenizers.hf",
            "vllm.utils.async_utils",
        ),
    },
    "log probabilities, and what ends engines": {
        "backend_worker/engine/vllm_faults/cpu_adapters.py": (
            "vllm.lora.ops.torch_ops.lora_ops",
            "vllm.lora.punica_wrapper.punica_cpu",
        ),
        "backend_worker/engine/vllm_faults/cpu_strides.py": ("vllm._custom_ops",),
        "backend_worker/engine/vllm_faults/cpu_seeds.py": ("vllm.v1.worker.gpu_input_batch",),
        "backend_worker/engine/vllm_faults/token_logprobs.py": (
            "vllm.v1.outputs",
            "vllm.v1.sample.metadata",
            "vllm.v1.sample.sampler",
        ),
        "backend_worker/engine/vllm_faults/uneven_media.py": (
            "vllm.model_executor.models.registry",
            "vllm.multimodal.utils",
        ),
    },
    "structures of answers": {
        "backend_worker/engine/slow_structures.py": (
            "vllm.config",
            "vllm.v1.structured_output.backend_types",
            "vllm.v1.structured_output.backend_xgrammar",
        ),
        "backend_worker/engine/vllm_faults/structure_backends.py": ("vllm.v1.structured_output",),
        "frontend/bounded/structure_server.py": ("vllm.v1.structured_output.backend_outlines",),
        "frontend/processing/structures.py": (
            "vllm.config",
            "vllm.entrypoints.generate.base.protocol",
            "vllm.parser.abstract_parser",
            "vllm.sampling_params",
            "vllm.utils.mistral",
            "vllm.v1.structured_output.backend_guidance",
            "vllm.v1.structured_output.backend_xgrammar",
            "vllm.v1.structured_output.utils",
        ),
    },
    "how pooling requests are served": {
        "frontend/http/server/pooling.py": (
            "vllm.entrypoints.pooling.base.serving",
            "vllm.entrypoints.pooling.classify.protocol",
            "vllm.entrypoints.pooling.classify.serving",
            "vllm.entrypoints.pooling.scoring.io_processor",
            "vllm.entrypoints.pooling.scoring.typing",
            "vllm.entrypoints.pooling.utils",
        ),
    },
    "`EngineClient`": {
        "frontend/http/server/vllm_server.py": ("vllm.engine.protocol",),
        "frontend/request/engine_client.py": (
            "vllm.engine.protocol",
            "vllm.renderers.inputs.preprocess",
            "vllm.v1.engine",
            "vllm.v1.engine.exceptions",
            "vllm.v1.kv_hints",
        ),
        "frontend/request/runner.py": ("vllm.engine.protocol", "vllm.v1.engine"),
    },
    "configuration and arguments, as cards have them": {
        "common/vllm_compat/engine_arguments.py": ("vllm", "vllm.config"),
        "common/vllm_compat/engine_settings.py": ("vllm", "vllm.config", "vllm.envs"),
    },
    "renderer, configuration without a device": {
        "frontend/processing/mrope.py": ("vllm.config", "vllm.model_executor.model_loader"),
        "frontend/processing/preprocessor.py": ("vllm.config", "vllm.renderers"),
        "frontend/processing/renderer.py": ("vllm", "vllm.config", "vllm.renderers"),
    },
    "what is replaced on the renderer, on both sides": {
        "common/media/decoded_media.py": ("vllm.multimodal.media",),
        "common/vllm_compat/renderer_patches.py": (
            "vllm.inputs",
            "vllm.multimodal",
            "vllm.multimodal.cache.base",
            "vllm.multimodal.processing",
            "vllm.renderers",
            "vllm.renderers.chat_utils",
            "vllm.utils.async_utils",
        ),
    },
    "chats with a Mistral tokenizer": {
        "frontend/processing/mistral_chat.py": (
            "vllm.multimodal.parse",
            "vllm.renderers",
            "vllm.renderers.chat_utils",
            "vllm.renderers.inputs",
            "vllm.renderers.inputs.preprocess",
            "vllm.renderers.mistral",
            "vllm.renderers.params",
        ),
        "frontend/processing/preprocessor.py": ("vllm.utils.mistral",),
    },
    "chat templates of clients": {
        "frontend/processing/client_templates.py": (
            "vllm.renderers",
            "vllm.renderers.hf",
            "vllm.renderers.inputs",
            "vllm.renderers.params",
        ),
        "frontend/processing/preprocessor.py": ("vllm.renderers.chat_utils", "vllm.renderers.hf"),
        "frontend/bounded/template_server.py": ("vllm.renderers.hf",),
    },
    "input processor": {
        "backend_worker/engine/sampler_limits.py": (
            "vllm.envs",
            "vllm.v1.engine",
        ),
        "backend_worker/engine/vocabulary.py": ("vllm.v1.engine",),
        "common/vllm_compat/structures_once.py": (
            "vllm.sampling_params",
            "vllm.v1.engine",
            "vllm.v1.engine.input_processor",
        ),
        "frontend/processing/preprocessor.py": ("vllm.v1.engine",),
    },
    "media processor, its hashes": {
        "backend_worker/engine/render.py": (
            "vllm.multimodal.media",
            "vllm.multimodal.processing",
            "vllm.renderers",
            "vllm.renderers.inputs.preprocess",
            "vllm.transformers_utils.processor",
        ),
        "frontend/processing/backends.py": ("vllm.renderers",),
        "frontend/processing/batch.py": (
            "vllm.multimodal.media",
            "vllm.multimodal.processing",
            "vllm.multimodal.processing.processor",
            "vllm.utils.torch_utils",
        ),
        "frontend/processing/client_tensors.py": ("vllm.multimodal.hasher",),
        "frontend/processing/media_processing.py": ("vllm.renderers",),
        "frontend/processing/renderer_processing.py": (
            "vllm.multimodal.processing",
            "vllm.renderers",
        ),
    },
    "media processor's cache": {
        "frontend/processing/preprocessor.py": ("vllm.multimodal.cache.base",),
        "frontend/processing/store.py": (
            "vllm.multimodal.cache.base",
            "vllm.multimodal.processing.processor",
        ),
        "frontend/processing/renderer_processing.py": (
            "vllm.multimodal.cache.base",
            "vllm.utils.cache",
        ),
        "frontend/fetch/processor_memory.py": ("vllm.multimodal.processing",),
    },
    "fetching and decoding of media": {
        "frontend/fetch/connector.py": ("vllm.multimodal.media", "vllm.multimodal.media.video"),
        "frontend/fetch/decoded.py": ("vllm.multimodal.media",),
        "frontend/fetch/decoder_processes.py": ("vllm.multimodal.media",),
        "frontend/fetch/decoders.py": (
            "vllm.envs",
            "vllm.multimodal.media",
            "vllm.multimodal.media.audio",
        ),
        "frontend/fetch/loader.py": ("vllm.envs", "vllm.multimodal.media"),
        "frontend/fetch/format_probe.py": ("vllm.multimodal.media",),
        "frontend/fetch/content.py": ("vllm.multimodal.video",),
        "frontend/fetch/sound_limit.py": ("vllm.envs",),
        "frontend/fetch/video_limit.py": (
            "vllm.envs",
            "vllm.multimodal.media",
            "vllm.multimodal.video",
            "vllm.multimodal.video_decoders.opencv",
        ),
    },
    "decoders, and what they may open": {
        "common/media/decoder_guard.py": (
            "vllm.multimodal.audio",
            "vllm.multimodal.image",
            "vllm.multimodal.media",
            "vllm.multimodal.media.audio",
            "vllm.multimodal.media.image",
            "vllm.multimodal.video_decoders.torchcodec",
        ),
        "common/media/picture_metadata.py": (
            "vllm.multimodal.image",
            "vllm.multimodal.media.image",
        ),
        "common/media/resampling.py": ("vllm.multimodal.audio",),
        "frontend/check.py": ("vllm.multimodal.audio", "vllm.platforms"),
        "frontend/fetch/picture_limit.py": ("vllm.multimodal.image",),
    },
    "configuration of the engine": {
        "backend_worker/engine/encodings.py": (
            "vllm.config",
            "vllm.distributed.ec_transfer.ec_connector.base",
            "vllm.distributed.ec_transfer.ec_connector.cpu.connector",
            "vllm.v1.request",
        ),
        "backend_worker/engine/config.py": ("vllm", "vllm.config", "vllm.usage.usage_lib"),
    },
    "engine, its media cache and statistics": {
        "backend_worker/engine/vllm_engine.py": (
            "vllm",
            "vllm.envs",
            "vllm.multimodal.cache",
            "vllm.v1.engine.async_llm",
            "vllm.v1.engine.exceptions",
        ),
        "backend_worker/engine/statistics.py": (
            "vllm.config",
            "vllm.v1.metrics.loggers",
            "vllm.v1.metrics.stats",
        ),
        "common/request_plane/protocol.py": ("vllm.v1.metrics.stats",),
    },
    "where an engine leaves its outputs": {
        "backend_worker/engine/outputs.py": (
            "vllm.v1.engine.async_llm",
            "vllm.v1.engine.output_processor",
        ),
    },
    "the socket by which an engine's outputs come": {
        "backend_worker/engine/outputs.py": (
            "vllm.utils.network_utils",
            "vllm.v1.engine.core_client",
        ),
    },
    "what engines are asked": {
        "backend_worker/engine/calls.py": ("vllm.v1.engine.async_llm",),
    },
    "operations of engines": {
        "backend_worker/engine/operations.py": ("vllm.v1.engine.async_llm",),
    },
    "detokenizer, for answers that go on elsewhere": {
        "frontend/request/resume.py": ("vllm.v1.engine", "vllm.v1.engine.detokenizer"),
    },
    "block hashing": {
        "backend_worker/engine/vllm_engine.py": (
            "vllm.utils.hashing",
            "vllm.v1.core.kv_cache_utils",
        ),
    },
    "KV events, published": {
        "backend_worker/kv_events/event_log.py": ("vllm.distributed.kv_events",),
        "backend_worker/kv_events/held_blocks.py": ("vllm.distributed.kv_events",),
        "backend_worker/kv_events/event_publisher.py": (
            "vllm.config",
            "vllm.distributed.kv_events",
        ),
    },
    "tensor encoding": {
        "common/transfer/codec.py": ("vllm.multimodal.inputs",),
        "common/request_plane/wire.py": ("vllm.v1.serial_utils",),
    },
    "platform": {
        "backend_worker/engine/sampler_limits.py": ("vllm.platforms",),
        "common/vllm_compat/preflight.py": ("vllm.platforms",),
    },
}
"""Surface -> file -> modules of vLLM that it may import for that surface."""

MOVED: Final[Mapping[str, str]] = {
    "vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args",
}
"""Modules that one of the supported versions has here and another there: older -> newer."""

NEW: Final = ("vllm.renderers.chat_utils.chat_message",)
"""Modules that only the newer of the supported versions has."""


@dataclass(frozen=True)
class Import:
    """What a file imports from vLLM.

    Attributes:
        file: path from the project's root.
        module: of vLLM.
        name: in the module; None for the module itself.
    """

    file: str
    module: str
    name: str | None

    @property
    def is_value(self) -> bool:
        """Whether any file may have it."""
        return self.name in VALUES.get(self.module, ())


def imports(root: Path = ROOT) -> list[Import]:
    """All of the project's imports from vLLM, wherever in a file they stand."""
    return [
        each
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        for each in imports_of(path.read_text(), path.relative_to(root).as_posix())
    ]


def imports_of(source: str, file: str) -> Iterator[Import]:
    """One file's imports from vLLM."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                for alias in names:
                    if _is_vllms(alias.name):
                        yield Import(file, alias.name, None)
            case ast.ImportFrom(str(module), names, 0) if _is_vllms(module):
                for alias in names:
                    inner = f"{module}.{alias.name}"
                    yield (
                        Import(file, inner, None)
                        if _is_module(inner)
                        else Import(file, module, alias.name)
                    )


def _is_vllms(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _is_module(name: str) -> bool:
    # By its file: vLLM would take seconds to be imported.
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed here")
    path = Path(spec.submodule_search_locations[0], *name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def disagreements(found: Iterable[Import]) -> list[str]:
    """What is imported and stands nowhere above, and what stands there and nobody imports."""
    found = list(found)
    wild = [each for each in found if not each.is_value]
    touched = {(each.file, each.module) for each in wild}
    listed = [
        (file, module)
        for files in SURFACES.values()
        for file, modules in files.items()
        for module in modules
    ]
    imported_values = {(each.module, each.name) for each in found if each.is_value}
    values = {(module, name) for module, names in VALUES.items() for name in names}
    return sorted(
        [
            f"{each.file} imports {each.name or 'all'} of {each.module}, which is no value "
            "and belongs to none of the file's surfaces"
            for each in wild
            if (each.file, each.module) not in listed
        ]
        + [
            f"{file} does not import {module}, as one of its surfaces says"
            for file, module in set(listed) - touched
        ]
        + [
            f"{file} has {module} in two surfaces"
            for file, module in set(listed)
            if listed.count((file, module)) > 1
        ]
        + [
            f"nobody imports the value {name} of {module}"
            for module, name in values - imported_values
        ]
    )


def section(found: Iterable[Import]) -> str:
    """The part of the page between its two marks."""
    touched: defaultdict[str, set[str]] = defaultdict(set)
    values: defaultdict[str, set[str]] = defaultdict(set)
    for each in found:
        if each.is_value and each.name is not None:
            values[each.module].add(each.name)
        else:
            touched[each.file].add(each.module)
    surfaces = [
        (surface if index == 0 else "", f"`{file}`", _code({*modules} & touched[file]))
        for surface, files in SURFACES.items()
        for index, (file, modules) in enumerate(files.items())
    ]
    return "\n\n".join(
        (
            BEGIN,
            _table(("surface", "file", "imports"), surfaces),
            "Any file may import these types:",
            _table(
                ("module", "types"),
                ((f"`{module}`", _code(names)) for module, names in sorted(values.items())),
            ),
            replaced_names.section(),
            END,
        )
    )


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str, found: Iterable[Import]) -> str:
    """A page with its part on vLLM made anew.

    Raises:
        ValueError: it has not the two marks, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError("the page must have both marks, once each and in order")
    return before + section(found) + after


def main() -> None:
    found = imports()
    if wrong := disagreements(found) + replaced_names.disagreements(replaced_names.changes()):
        sys.exit("\n".join(wrong))
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text(), found))


if __name__ == "__main__":
    main()
