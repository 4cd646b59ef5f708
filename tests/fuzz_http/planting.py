"""Requests with a canary in one string each: of every schema, parameter, header and form."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from tests.clips import sound
from tests.fuzz_http.canaries import FILE, TEXTS, URL, Canaries
from tests.fuzz_http.hostile import Value
from tests.fuzz_http.requests import (
    MODEL,
    Inside,
    Leaf,
    Many,
    Node,
    Open,
    Request,
    encoded,
    good_of,
)
from tests.fuzz_http.schema import Api, Call, Route, Schema

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

REFUSE_NAMES: Final = ("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")
"""Fields that are refused for a name in them, so that names are sent one by one."""

ALONE: Final = ("audio",)
"""Names that messages are refused for."""

HEADERS: Final = (
    "accept", "authorization", "baggage", "content-encoding", "cookie",
    "endpoint-load-metrics-format", "forwarded", "host", "if-none-match", "origin", "priority",
    "range", "referer", "sec-fetch-site", "traceparent", "tracestate", "user-agent", "x-api-key",
    "x-data-parallel-rank", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto",
    "x-request-id", "x-session-id",
)  # fmt: skip
"""What frontend, vLLM and their libraries read of a request's head, and what a proxy writes."""

HEADERS_OF: Final = ("/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions")

FILES: Final = (
    f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{URL}\n#EXT-X-ENDLIST\n",
    f"#EXTM3U\n#EXTINF:10,\n{FILE}\n#EXT-X-ENDLIST\n",
    f"ffconcat version 1.0\nfile '{FILE}'\n",
    f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns={URL}\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\n",
    f'<?xml version="1.0"?><MPD><Period><BaseURL>{URL}</BaseURL></Period></MPD>',
    f'<!DOCTYPE svg [<!ENTITY a SYSTEM "{FILE}">]><svg><image href="{URL}"/>&a;</svg>',
    f"cos\nsystem\n(S'cat {FILE}'\ntR.",
)
"""Uploads that have a decoder open something, if it takes them."""

NAMES_EACH: Final = 6
"""So many in each place, of which the next place gets the next ones: most fields are on several
routes."""

_JSON: Final = {"Content-Type": "application/json"}
_BOUNDARY: Final = "between-parts"
_FORM: Final = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
_SPOKEN: Final = {"model": "demo", "language": "en", "max_completion_tokens": "2"}
_QUERY: Final = "something"


@dataclass(frozen=True)
class Plant:
    """A request with one canary.

    Attributes:
        number: of the canary, which no other has.
        call: method and path, as the frontend describes them.
        path: with its parameters.
        ways: where the canary is, and what it says.
    """

    number: int
    call: tuple[str, str]
    path: str
    ways: Sequence[str]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __str__(self) -> str:
        return f"{' '.join(self.call)}: {'; '.join(self.ways)}"


@dataclass
class Planting:
    """Goes through what a frontend says of itself.

    Attributes:
        known: fields that were planted in full, with their schemas. Where another route has the
            same, each name within gets one canary, as the same code reads it. Grows.
        thin: routes of which that is so for all fields.
    """

    api: Api
    canaries: Canaries
    numbers: Iterator[int] = field(default_factory=itertools.count)
    known: set[str] = field(default_factory=set)
    thin: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._texts = itertools.cycle(TEXTS)
        self._names = itertools.cycle(OPEN_NAMES)
        self._routes = {route.path: route for route in self.api.routes}

    def plants(self, call: Call) -> Iterator[Plant]:
        """Yield the requests of a method of a route."""
        route = self._routes.get(call.path) if call.method == "POST" else None
        if route is None:
            yield from self._parameters(call)
        elif route.form:
            yield from self._form(call, route)
        else:
            yield from self._parameters(call)
            for request in self.requests(route):
                number, path = next(self.numbers), call.path.replace("{worker_id}", "w")
                body = encoded(self.canaries.fill(request.text, number))
                yield Plant(number, (call.method, call.path), path, request.ways, _JSON, body)
        if route is not None and call.path in HEADERS_OF:
            yield from self._headers(call, route)

    def requests(self, route: Route) -> Iterator[Request]:
        """Yield those with a body in JSON."""
        good = good_of(self.api, route)
        done, known = set[tuple[str, str]](), set[str]()
        for branch in self.api.branches(route.schema):
            needed = self.api.example(branch) or {}
            base = good if needed.keys() <= good.keys() else needed | MODEL
            for name, schema in branch.get("properties", {}).items():
                planted = json.dumps([name, schema], sort_keys=True)
                thin = route.path in self.thin or planted in self.known
                known.add(planted)
                for node in self._nodes(schema, 1, frozenset(), name):
                    way = f"{name}{node.shape}"
                    shape = _last_name(way) if thin else way
                    if (name, shape) not in done:  # unions have fields in common
                        done.add((name, shape))
                        yield Request(route.path, base, {name: node})
        self.known |= known  # not before: of one route each branch is planted in full
        for text in TEXTS:
            yield Request(route.path, good, {_QUERY: Leaf(_value(text))})

    def _parameters(self, call: Call) -> Iterator[Plant]:
        """Each of a query or a path, and one more where that starts nothing."""
        places = {each["name"]: each["in"] for each in call.parameters if each["in"] != "header"}
        if call.method == "GET" or not places:
            places[_QUERY] = "query"
        for planted, where in places.items():
            for _ in range(3 if where == "path" or planted in (_QUERY, "request_id") else 1):
                number, text = next(self.numbers), next(self._texts)
                said = quote(self.canaries.fill(text, number), safe="")
                path = call.path
                for name in (each for each in places if f"{{{each}}}" in path):
                    path = path.replace(f"{{{name}}}", said if name == planted else "w")
                query = f"?{planted}={said}" if where == "query" else ""
                yield Plant(number, (call.method, call.path), path + query, [f"{planted} = {text}"])

    def _headers(self, call: Call, route: Route) -> Iterator[Plant]:
        for name in HEADERS:
            for _ in range(2):
                number, text = next(self.numbers), next(self._texts)
                said = {name: self.canaries.fill(text, number)}
                if route.form:
                    kind, body = _FORM, _form(self._spoken())
                else:
                    kind, body = _JSON, json.dumps(good_of(self.api, route)).encode()
                way = f"header {name} = {text}"
                yield Plant(number, (call.method, call.path), call.path, [way], kind | said, body)

    def _form(self, call: Call, route: Route) -> Iterator[Plant]:
        """A form with a canary as each field, in each place of a part, and as what is uploaded."""
        for way, parts in self._parts(route):
            number = next(self.numbers)
            filled = [
                (self.canaries.fill(head, number), self.canaries.fill(data, number))
                if isinstance(data, str)
                else (self.canaries.fill(head, number), data)
                for head, data in parts
            ]
            call_of = (call.method, call.path)
            yield Plant(number, call_of, call.path, [way], _FORM, _form(filled))

    def _parts(self, route: Route) -> Iterator[tuple[str, list[tuple[str, str | bytes]]]]:
        spoken = self._spoken()
        fields = [
            name
            for branch in self.api.branches(route.schema)
            for name in (*branch.get("properties", {}), _QUERY)
        ]
        for name in fields:
            others = [part for part in spoken if f'name="{name}"' not in part[0]]
            for text in TEXTS:
                yield f"{name} = {text}", [*others, (_head(name), text)]
        for text in (*TEXTS, f"../{TEXTS[3]}\0.wav", f"{URL}\r\nContent-Type: audio/wav"):
            file = spoken[-1][1]
            yield f"filename = {text}", [*spoken[:-1], (_head("file", text), file)]
            yield f"name of a field = {text}", [(_head(text), "1"), *spoken]
            yield (
                f"type of a part = {text}",
                [*spoken[:-1], (f"{_head('file', 'a.wav')}\r\nContent-Type: {text}", file)],
            )
        for text in FILES:
            for name in ("a.wav", "a.m3u8", "a.mp4"):
                yield f"file = {text}", [*spoken[:-1], (_head("file", name), text)]

    def _spoken(self) -> list[tuple[str, str | bytes]]:
        """A form that is answered with 200."""
        return [
            *((_head(name), value) for name, value in _SPOKEN.items()),
            (_head("file", "a.wav"), sound("canary", 0.2)),
        ]

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
                yield from self._fields(branch, depth, inside, name)
            if kind == "array":
                for node in self._nodes(branch.get("items", {}), depth + 1, inside, name):
                    yield Many(1, node)

    def _fields(
        self, branch: Schema, depth: int, seen: frozenset[int], field: str
    ) -> Iterator[Node]:
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
        names = [*itertools.islice(self._names, NAMES_EACH)]
        alone = [each for each in names if field in REFUSE_NAMES or each in ALONE]
        for name in alone:
            for leaf in self._leaves(depth):
                yield Inside(needed, name, leaf)
        planted = {each: next(self._texts) for each in names if each not in alone}
        yield Open({**needed, **dict.fromkeys(TEXTS[:2], 1)}, planted)

    def _leaves(self, depth: int, name: str = "") -> Iterator[Node]:
        for _ in range(len(TEXTS) if name in TELLING else 1):
            leaf = Leaf(_value(next(self._texts)))
            yield leaf
            if depth == 1:
                yield Many(1, leaf)


def _value(text: str) -> Value:
    return Value("literal", json.dumps(text))


def _last_name(way: str) -> str:
    """Return the name of the field that a canary is in."""
    return way.partition(" = ")[0].rpartition(".")[2]


def _head(name: str, filename: str | None = None) -> str:
    file = "" if filename is None else f'; filename="{filename}"'
    return f'Content-Disposition: form-data; name="{name}"{file}'


def _form(parts: Iterable[tuple[str, str | bytes]]) -> bytes:
    whole = b"".join(
        f"--{_BOUNDARY}\r\n{head}\r\n\r\n".encode()
        + (encoded(data) if isinstance(data, str) else data)
        + b"\r\n"
        for head, data in parts
    )
    return whole + f"--{_BOUNDARY}--\r\n".encode()
