"""Requests with a canary in one string of a schema each: of every schema, in every place."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tests.fuzz_http.canaries import TEXTS
from tests.fuzz_http.hostile import Value
from tests.fuzz_http.requests import GOOD, MODEL, Inside, Leaf, Many, Node, Request
from tests.fuzz_http.schema import Api, Route, Schema

OPEN_NAMES: Final = (
    "a", "audio", "audios", "auto_map", "backend", "cache_dir", "chat_template", "conversation",
    "documents", "file", "font_path", "image", "image_processor_type", "image_url", "images",
    "load_audio_from_video", "model", "path", "pretrained_model_name_or_path", "processor_class",
    "processor_kwargs", "return_tensors", "template", "text", "tokenizer", "tokenizer_file",
    "tools", "torch_dtype", "url", "video", "video_backend", "videos",
)  # fmt: skip
"""Names to try where a schema lets any be."""

TELLING: Final = (
    "prompt_embeds", "image_embeds", "audio_embeds", "video_embeds", "image_url", "lora_path",
    "chat_template", "server_url", "file_url", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
"""Fields that get all canaries, a pickle among them, since they are there to name or to hold
something."""

NAMES_EACH: Final = 6
"""So many in each place, of which the next place gets the next ones: most fields are on several
routes."""


@dataclass
class Planting:
    """Goes through schemas.

    Attributes:
        each: canaries for each place, of which the next place gets the next ones.
    """

    api: Api
    each: int = 1

    def __post_init__(self) -> None:
        self._next = itertools.count()
        self._names = itertools.cycle(OPEN_NAMES)

    def requests(self, route: Route) -> Iterator[Request]:
        """Yield the requests of a route."""
        good = MODEL | dict(GOOD.get(route.path) or self.api.example(route.schema) or {})
        done = set[tuple[str, str]]()
        for branch in self.api.branches(route.schema):
            for name, schema in branch.get("properties", {}).items():
                for node in self._nodes(schema, 1, frozenset(), name):
                    if (name, node.shape) not in done:  # unions have fields in common
                        done.add((name, node.shape))
                        yield Request(route.path, good, {name: node})
        for text in TEXTS:
            yield Request(route.path, good, {"something": Leaf(_value(text))})

    def _nodes(
        self, schema: Schema, depth: int, seen: frozenset[int], name: str = ""
    ) -> Iterator[Node]:
        for branch in self.api.branches(schema):
            if id(branch) in seen or "const" in branch:
                continue
            inside = seen | {id(branch)}
            kind = branch.get("type")
            if kind in (None, "string"):
                yield from self._leaves(depth, name)
            if kind in (None, "object"):
                yield from self._fields(branch, depth, inside)
            if kind == "array":
                for node in self._nodes(branch.get("items", {}), depth + 1, inside, name):
                    yield Many(1, node)

    def _fields(self, branch: Schema, depth: int, seen: frozenset[int]) -> Iterator[Node]:
        needed = self.api.example(branch)
        needed = needed if isinstance(needed, dict) else {}
        fields = branch.get("properties", {})
        for name, schema in fields.items():
            others = {other: value for other, value in needed.items() if other != name}
            for node in self._nodes(schema, depth + 1, seen, name):
                yield Inside(others, name, node)
        values = branch.get("additionalProperties", not fields)
        if not values:
            return
        if isinstance(values, Mapping) and values:
            for node in self._nodes(values, depth + 1, seen):
                yield Inside(needed, "image", node)
        for name in itertools.islice(self._names, NAMES_EACH * self.each):
            for leaf in self._leaves(depth):
                yield Inside(needed, name, leaf)
        for text in TEXTS[:2]:
            yield Inside(needed, text, Leaf(Value("literal", "1")))

    def _leaves(self, depth: int, name: str = "") -> Iterator[Node]:
        for _ in range(len(TEXTS) if name in TELLING else self.each):
            leaf = Leaf(_value(TEXTS[next(self._next) % len(TEXTS)]))
            yield leaf
            if depth == 1:
                yield Many(1, leaf)


def _value(text: str) -> Value:
    return Value("literal", json.dumps(text))
