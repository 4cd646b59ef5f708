"""Stop vLLM's validation of a request at the first wrong item of each list and each object.

Pydantic reports every error of every member of a union for every item: 119 KB of wrong items took
26 s and a million errors, all on the event loop. Texts of errors show no input: Pydantic writes all
of it down for each error before it shortens that, 60 MB in 2 s.

vLLM also looks in each object for unknown fields, to log them. In the parts of a stream's events,
which it makes itself, this takes a fifth of their time and is left out.

A batch validates its conversations twice. Pydantic checks an ``Iterable`` while it is iterated,
once: the second time a wrong content was empty, and the answer a 200.
"""

import importlib
from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel
from pydantic_core import SchemaValidator

_MODELS: Final = (
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.cohere.protocol",
    "vllm.entrypoints.generate.generative_scoring.serving",
    "vllm.entrypoints.generate.structured_decisions.protocol",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.openai.decisions.protocol",
    "vllm.entrypoints.openai.responses.protocol",
    "vllm.entrypoints.pooling.classify.protocol",
    "vllm.entrypoints.pooling.embed.protocol",
    "vllm.entrypoints.pooling.pooling.protocol",
    "vllm.entrypoints.pooling.scoring.protocol",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol",
    "vllm.entrypoints.serve.lora.protocol",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.protocol",
    "vllm.entrypoints.speech_to_text.transcription.protocol",
    "vllm.entrypoints.speech_to_text.translation.protocol",
)
"""Modules with the models of the bodies of vLLM's routes."""

_EVENTS: Final = {"ChatCompletionStreamResponse", "CompletionStreamResponse"}
"""Models of events, which contain the models of their parts."""

_READ_TWICE: Final = "BatchChatCompletionRequest"

_SERVER: Final = "vllm.entrypoints."
_CONFIGURED: Final = ("model", "typed-dict", "dataclass")
_COLLECTIONS: Final = ("list", "tuple", "set", "frozenset", "dict")


def fail_fast() -> None:
    """Patch vLLM's request models before its app copies their validators. May be called twice."""
    for name in _MODELS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Two cases: a package that vLLM can do without, or a module that only one vLLM has.
            if error.name != "cohere" and not name.startswith(str(error.name)):
                raise
    models = set(_subclasses(BaseModel))
    parts = {
        node.get("cls")
        for model in models
        if model.__name__ in _EVENTS
        for node in _nodes(vars(model).get("__pydantic_core_schema__"))
    }
    for model in models:
        schema = vars(model).get("__pydantic_core_schema__")
        if model.__module__.startswith(_SERVER) and isinstance(schema, dict):
            for node in _nodes(schema) if model.__name__ == _READ_TWICE else ():
                node.update({"type": "list"} if node.get("type") == "generator" else {})
            for collection in collections_in(schema):
                collection["fail_fast"] = True
            for node in [*_nodes(schema)] if model in parts else ():
                _log_nothing(node)
            for node in _nodes(schema):
                if node.get("type") in _CONFIGURED:
                    config = node.get("config")
                    inner = dict(config) if isinstance(config, dict) else {}
                    node["config"] = inner | {"hide_input_in_errors": True}
            # Members of its unions that were used already have prebuilt validators, which go to
            # the end of each list.
            model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)


def collections_in(schema: object) -> Iterator[dict[str, object]]:
    """Yield each schema of a collection within one of pydantic's core schemas, except models and
    typed dicts: the table of fields bounds those that forbid other names.
    """
    return (node for node in _nodes(schema) if node.get("type") in _COLLECTIONS)


def _nodes(schema: object) -> Iterator[dict[str, object]]:
    left, seen = [schema], set[int]()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield node
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            left.extend(node)


def _log_nothing(node: dict[str, object]) -> None:
    """Remove the search for unknown fields from a schema."""
    wrap = node.get("function") if node.get("type") == "function-wrap" else None
    function = wrap.get("function") if isinstance(wrap, dict) else None
    if getattr(function, "__name__", "") == "__log_extra_fields__":
        inner, ref = node["schema"], {"ref": node["ref"]} if "ref" in node else {}
        assert isinstance(inner, dict)
        node.clear()
        node.update(inner | ref)


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from _subclasses(each)
