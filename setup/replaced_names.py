"""What the product replaces of other people's code at run time, and why no public hook serves.

``PROCESS`` are names of modules and classes, of which each code in the process gets ours.
``OBJECTS`` are attributes of single objects, which the product holds or was given. Both name a file
and there the expressions, as they are written. ``tests/unit/test_replaced_names.py`` fails where
the source has another one, and where one of these is gone.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("backend_worker", "common", "frontend")
MAX_PROCESS: Final = 10
"""Mechanisms that may replace names for a whole process."""

_NAMESPACES: Final = ("vars", "globals", "locals")
_FUNCTION_PARTS: Final = ("__globals__", "__code__", "__closure__", "__defaults__", "f_globals")
_PUBLIC: Final = ("__traceback__", "_value_")
"""Attributes that Python has code set."""


@dataclass(frozen=True)
class Mechanism:
    """Some replaced names that serve one end.

    Attributes:
        what: it does.
        why: no public hook does it.
        names: file -> expressions.
    """

    what: str
    why: str
    names: Mapping[str, tuple[str, ...]]


PROCESS: Final = (
    Mechanism(
        "The gate reads a body once, JSON or form, and its limits hold for what vLLM validates.",
        "FastAPI takes a class of requests with a class of routes, and vLLM's routes have theirs "
        "when their module is imported.",
        {"frontend/gate/body_gate.py": ("Request.json", "Request.form")},
    ),
    Mechanism(
        "Validation of a request stops at the first wrong item of each list, and parts of events "
        "are made without a look for unknown fields.",
        "Pydantic has it for fields that are declared so. The models are vLLM's.",
        {"frontend/gate/fail_fast.py": ("model.__pydantic_validator__",)},
    ),
    Mechanism(
        "A content part of the wrong type is a 400 on all routes. Data URLs leave memory with a "
        "request.",
        "vLLM reads parts in a function of a module, after Pydantic has taken any value for them, "
        "and makes the objects that keep them itself.",
        {
            "common/vllm_compat/renderer_patches.py": ("AsyncMultiModalItemTracker.create_parser",),
            "frontend/http/limits/content_parts.py": ("vars(_MODULE)[_NAME]",),
        },
    ),
    Mechanism(
        "Answers of many engine calls are merged, and errors freed of paths, at a cost that is "
        "linear.",
        "vLLM's routes import a function of a module.",
        {
            "frontend/http/error_shapes.py": ("vars(utils)['re']",),
            "frontend/http/streaming/merging.py": ("vars(module)[_NAME]",),
        },
    ),
    Mechanism(
        "Decoders, resamplers and processors open nothing but the bytes that they are given, and "
        "take what these need.",
        "Models' own code calls them too. They have no setting for a process, but for Pillow's and "
        "vLLM's largest picture.",
        {
            "common/media/decoder_guard.py": (
                "ImageMediaIO._convert_image_mode",
                "ImageMediaIO.load_bytes",
                "audio.AudioDecoder",
                "audio._torchcodec_import_exc",
                "audio.soundfile",
                "av.open",
                "cv2.VideoCapture",
                "image.ALLOWED_IMAGE_FORMATS",
                "media_image.normalize_image",
                "resampling._get_torchaudio_resampler",
                "torch.load",
                "torchcodec.VideoDecoder",
                "vars(av)['AudioResampler']",
            ),
            "common/media/picture_metadata.py": (
                "image.open_image",
                "media_image.open_image",
                "vars(TiffImagePlugin)['ImageFileDirectory_v2']",
            ),
            "common/vllm_compat/features.py": ("OpenCVVideoBackendMixin.demux_count_frames",),
            "frontend/fetch/decoders.py": ("Image.MAX_IMAGE_PIXELS", "envs.VLLM_MAX_IMAGE_PIXELS"),
            "frontend/fetch/processor_memory.py": (
                "Image.Image.resize",
                "WhisperFeatureExtractor._torch_extract_fbank_features",
                "pictures.__array__",
                "pictures.__array_interface__",
            ),
        },
    ),
    Mechanism(
        "vLLM compiles no structure of an answer before a trial of it has ended, and each with its "
        "own backend. No answer makes an engine wait for its structure again and again.",
        "vLLM compiles structural tags in validators of its request models, and structures beside "
        "tools in a function of a module. Its backend makes the states of answers of a class of "
        "its module.",
        {
            "backend_worker/engine/slow_structures.py": (
                "backend_xgrammar.XgrammarBackend.compile_grammar",
                "vars(backend_xgrammar)['XgrammarGrammar']",
            ),
            "backend_worker/engine/vllm_faults/structure_backends.py": (
                "StructuredOutputManager.grammar_init",
            ),
            "frontend/processing/structures.py": (
                "vars(abstract_parser)['_xgrammar_supports']",
                "protocol.validate_structural_tag_payload",
            ),
        },
    ),
    Mechanism(
        "Each answer has its own log probabilities, also beside one that names tokens, and its own "
        "adapter or none. No seed, no prompt of one token, no small picture and no two sounds end "
        "an engine.",
        "vLLM's model runner constructs its sampler and its batch, and takes none. Layers call "
        "kernels of a module, and media are put together by functions of one.",
        {
            "backend_worker/engine/vllm_faults/cpu_adapters.py": (
                "vars(lora_ops)[_name]",
                "vars(punica_cpu)[_name]",
            ),
            "backend_worker/engine/vllm_faults/cpu_strides.py": (
                "vars(_custom_ops)['causal_conv1d_fwd_cpu']",
                "vars(_custom_ops)['onednn_mm']",
            ),
            "backend_worker/engine/vllm_faults/cpu_seeds.py": ("InputBatch.add_request",),
            "backend_worker/engine/vllm_faults/token_logprobs.py": (
                "Sampler.forward",
                "Sampler.gather_specific_token_logprobs",
            ),
            "backend_worker/engine/vllm_faults/uneven_media.py": (
                "_LazyRegisteredModel.load_model_cls",
                "kind.embed_input_ids",
                "kind.embed_multimodal",
                "vars(utils)['_can_batch_mm_items']",
            ),
        },
    ),
    Mechanism(
        "A worker reads its engine's outputs without pyzmq's futures.",
        "vLLM's client makes the socket where it is constructed, and takes none.",
        {"backend_worker/engine/outputs.py": ("vars(core_client)['make_zmq_socket']",)},
    ),
    Mechanism(
        "The text of an answer costs neither the length of its prompt, nor the square of the "
        "number of tokens that have none.",
        "vLLM looks the class up in its module, so that backends can replace it there.",
        {"common/vllm_compat/text_streams.py": ("vars(tokenizers.decoders)['DecodeStream']",)},
    ),
    Mechanism(
        "The process for NIXL does not import PyTorch, which takes a second.",
        "NIXL imports it to learn of a version of CUDA, and can't be told.",
        {"common/transfer/nixl_processes/child.py": ("sys.modules['torch']",)},
    ),
)

OBJECTS: Final = (
    Mechanism(
        "Prompts and media are processed within limits: threads that are watched, hashes and "
        "processes of ours, templates of clients aside.",
        "RENDERER_REGISTRY takes one class for each of vLLM's renderers, and none for the "
        "processor within.",
        {
            "common/vllm_compat/renderer_patches.py": (
                "renderer._apply_chat_template_async",
                "renderer._async_tokenizer_decode",
                "renderer._clear_mm_cache_async",
                "renderer._mm_executor",
                "renderer._mm_processor_cache",
                "renderer._mm_processor_only_cache",
                "renderer._process_multimodal_async",
                "renderer._tokenize_prompt_async",
                "renderer.render_messages",
                "renderer.render_messages_async",
                "setattr(processor, name)",
                "texts._inner",
                "texts.replace_inner",
            ),
            "common/vllm_compat/structures_once.py": ("vars(structure).update(verdict)",),
            "frontend/processing/mistral_chat.py": (
                "instruct.audio_encoder",
                "instruct.image_encoder",
            ),
            "frontend/processing/renderer.py": ("config.parallel_config._api_process_count",),
        },
    ),
    Mechanism(
        "Serving objects are of subclasses, or do slow work in threads of ours.",
        "app.state is the hook: its objects are replaced. Those of speech and of scores have "
        "executors and methods of their own.",
        {
            "frontend/http/server/pooling.py": (
                "setattr(app.state, name)",
                "vars(made).update(vars(serving))",
            ),
            "frontend/http/server/serving_threads.py": (
                "alone._decode_and_chunk_speech_async",
                "alone._tokens",
                "serving._build_prompts",
                "serving._decode_and_chunk_speech_async",
                "serving._detect_language",
                "serving._preprocess_executor",
                "serving._preprocess_speech_to_text",
                "serving.create_tokenize",
                "setattr(chats, name)",
                "vars(encoding)[name]",
            ),
            "frontend/http/streaming/parsing.py": ("vars(derenderer).update(ours)",),
            "frontend/http/streaming/stream_errors.py": (
                "setattr(app.state, name)",
                "setattr(made, parses)",
                "vars(made).update(vars(serving))",
            ),
            "frontend/http/streaming/token_streams.py": (
                "setattr(state, name)",
                "state.args",
                "made.__dict__.update(vars(serving))",
            ),
            "frontend/http/server/tools.py": ("chats.create_error_response",),
        },
    ),
    Mechanism(
        "An answer with a medium has a limit on its heads and framing.",
        "aiohttp limits the size of each head, not their number, and a connector makes its "
        "connections' protocols by an attribute alone.",
        {"frontend/fetch/http.py": ("self._connector._factory",)},
    ),
    Mechanism(
        "Several apps of vLLM's are one server.",
        "vLLM's app is assembled when it is given to us, and each counts requests by itself.",
        {
            "frontend/http/server/vllm_server.py": (
                "app.state.server",
                "layer.app",
                "layer.instrumentations",
                "models.lora_requests",
                "own.base_model_paths",
            ),
        },
    ),
    Mechanism(
        "A connection may linger while an answer is written.",
        "uvicorn gives its transport to each request.",
        {"frontend/http/limits/connection.py": ("cycle.transport",)},
    ),
    Mechanism(
        "A worker sends outputs where vLLM leaves them.",
        "AsyncLLM.add_request() is the hook: it gives back where that is, made by itself.",
        {
            "backend_worker/engine/outputs.py": (
                "collector.__class__",
                "vars(collector)['take']",
            ),
        },
    ),
    Mechanism(
        "An output that can't be read ends its request, and not the engine.",
        "AsyncLLM makes the objects that read outputs itself, and takes any error of theirs for "
        "the end of its engine.",
        {
            "backend_worker/engine/outputs.py": (
                "self.output_processor.__class__",
                "part.__class__",
                "vars(part)['collector']",
            ),
        },
    ),
    Mechanism(
        "A worker decodes each candidate of a log probability once.",
        "vLLM's object that makes log probabilities is given the tokenizer of the renderer.",
        {"backend_worker/engine/token_texts.py": ("vars(tokenizer)['decode']",)},
    ),
    Mechanism(
        "vLLM's arguments and configuration have what cards and settings say.",
        "Their fields are the hook.",
        {
            "backend_worker/engine/config.py": ("setattr(args, name)",),
            "frontend/args.py": ("setattr(serve, name)",),
            "frontend/processing/renderer.py": (
                "setattr(config.model_config, name)",
                "setattr(model_config, name)",
                "setattr(serve_args, name)",
            ),
        },
    ),
)


@dataclass(frozen=True)
class Change:
    """One place of the source.

    Attributes:
        expression: what is assigned to, or called.
        foreign: whether that may only be another's, by how it is written.
    """

    file: str
    expression: str
    foreign: bool


def changes(root: Path = ROOT) -> list[Change]:
    """Find all places of the product."""
    return [
        each
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        for each in changes_of(path.read_text(), path.relative_to(root).as_posix())
    ]


def changes_of(source: str, file: str) -> Iterator[Change]:
    """Find the places of one file."""
    tree = ast.parse(source)
    imported, own = set(_imported(tree)), set(_own_attributes(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets) | ast.Delete(targets):
                yield from _targets(targets, imported, own, file)
            case ast.AnnAssign(target) | ast.AugAssign(target):
                yield from _targets([target], imported, own, file)
            case ast.Call(function, arguments) if _changes(function, imported):
                of = ", ".join(ast.unparse(each) for each in arguments[:2])
                yield Change(file, f"{ast.unparse(function)}({of})", foreign=True)
            case ast.Attribute(_, name) if name in _FUNCTION_PARTS:
                yield Change(file, ast.unparse(node), foreign=True)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file has from elsewhere than the product."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (each.asname or each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(str(module), names) if module.partition(".")[0] not in PACKAGES:
                yield from (each.asname or each.name for each in names)


def _own_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the names of attributes that the classes of a file give to their objects."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
            case ast.ClassDef(body=body):
                yield from (
                    each.target.id
                    for each in body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                )


def _targets(
    targets: Iterable[ast.expr], imported: set[str], own: set[str], file: str
) -> Iterator[Change]:
    for target in targets:
        match target:
            case ast.Tuple(inner) | ast.List(inner):
                yield from _targets(inner, imported, own, file)
            case ast.Attribute(ast.Name("self" | "cls"), _):
                pass
            case ast.Attribute(_, name):
                private = name.startswith("_") and name not in own.union(_PUBLIC)
                root = _root(target)
                foreign = private or root is None or root in imported
                yield Change(file, ast.unparse(target), foreign)
            case ast.Subscript(of) if _is_namespace(of, imported):
                yield Change(file, ast.unparse(target), foreign=True)


def _root(node: ast.expr) -> str | None:
    """Return the name with which an expression begins; None if it begins with a module or a class
    that is looked up."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    match node:
        case ast.Name(name):
            return name
        case ast.Call(ast.Name("__import__" | "type") | ast.Attribute(_, "import_module")):
            return None
    return ""


def _is_namespace(node: ast.expr, imported: set[str]) -> bool:
    """Whether an expression is the table of names of a module, a class, an object or a function."""
    match node:
        case ast.Call(ast.Name(name)):
            return name in _NAMESPACES
        case ast.Attribute(_, "__dict__" | "__globals__"):
            return True
        case ast.Attribute(ast.Name("sys"), "modules"):
            return "sys" in imported
    return False


def _changes(function: ast.expr, imported: set[str]) -> bool:
    match function:
        case ast.Name("setattr" | "delattr" | "exec"):
            return True
        case ast.Attribute(_, "__setattr__" | "__delattr__"):
            return True
        case ast.Attribute(of, "update" | "setdefault" | "pop" | "__setitem__"):
            return _is_namespace(of, imported)
    return False


def disagreements(found: Iterable[Change]) -> list[str]:
    """Return what is replaced and stands nowhere above, and what stands there and is not."""
    found = list(found)
    listed = [
        (file, expression)
        for each in (*PROCESS, *OBJECTS)
        for file, expressions in each.names.items()
        for expression in expressions
    ]
    there = {(each.file, each.expression) for each in found}
    wild = {(each.file, each.expression) for each in found if each.foreign} - set(listed)
    return sorted(
        [
            f"{file} replaces {expression}, and setup/replaced_names.py has no reason"
            for file, expression in wild
        ]
        + [f"{file} does not replace {expression}" for file, expression in set(listed) - there]
        + [
            f"{file} has {expression} twice"
            for file, expression in set(listed)
            if listed.count((file, expression)) > 1
        ]
    )


def section() -> str:
    """Return the tables for a page."""
    return "\n\n".join(
        (
            "Replaced for a whole process, at most "
            f"{MAX_PROCESS} mechanisms (`setup/replaced_names.py`):",
            _table(PROCESS),
            "Replaced on single objects:",
            _table(OBJECTS),
        )
    )


def _table(mechanisms: Iterable[Mechanism]) -> str:
    rows = [
        f"| {each.what} | {each.why} | {', '.join(f'`{file}`' for file in each.names)} |"
        for each in mechanisms
    ]
    return "\n".join(["| what it does | why no hook does it | where |", "|---|---|---|", *rows])
