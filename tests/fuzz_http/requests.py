"""Requests that are good but for one, two or three fields."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias

from tests.fuzz_http.hostile import Value, draw
from tests.fuzz_http.schema import Api, Json, Route, Schema, is_operators

MAX_BYTES: Final = 1_000_000
"""Of a request's body."""

MESSAGES: Final = [{"role": "user", "content": "hi"}]
MODEL: Final = {"model": "demo"}
SHORT: Final = {"max_tokens": 2}
_RERANK: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
GOOD: Final[Mapping[str, Json]] = {
    "/v1/chat/completions": {"messages": MESSAGES, **SHORT},
    "/v1/chat/completions/batch": {"messages": [MESSAGES], **SHORT},
    "/v1/completions": {"prompt": "hi", **SHORT},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, **SHORT},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/invocations": {"messages": MESSAGES, **SHORT},
    "/v1/embeddings": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
    "/pooling": {"input": "hi"},
    "/classify": {"input": "hi"},
    **{path: {"text_1": "a", "text_2": ["b"]} for path in ("/score", "/v1/score")},
    **{path: {"query": "a", "documents": ["b"]} for path in _RERANK},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": SHORT},
}
"""Bodies that are answered with 200, which a field of the right kind must not change. Routes that
are not here begin with what their schema needs."""

Node: TypeAlias = "Leaf | Inside | Many | Open"


@dataclass(frozen=True)
class Leaf:
    """A hostile value in place of what should be there."""

    value: Value

    @property
    def text(self) -> str:
        return self.value.text

    @property
    def shape(self) -> str:
        return f" = {self.value.shape}"

    def smaller(self) -> Iterator[Node]:
        for value in self.value.smaller():
            yield Leaf(value)


@dataclass(frozen=True)
class Inside:
    """An object with one field that is hostile inside.

    Attributes:
        others: its other fields.
    """

    others: Mapping[str, Json]
    name: str
    inner: Node

    @property
    def text(self) -> str:
        fields = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in self.others.items()]
        return "{" + ",".join([*fields, f"{json.dumps(self.name)}:{self.inner.text}"]) + "}"

    @property
    def shape(self) -> str:
        return f".{self.name}{self.inner.shape}"

    def smaller(self) -> Iterator[Node]:
        for inner in self.inner.smaller():
            yield replace(self, inner=inner)


@dataclass(frozen=True)
class Many:
    """A list of equal items that are hostile inside."""

    count: int
    inner: Node

    @property
    def text(self) -> str:
        return "[" + ",".join([self.inner.text] * self.count) + "]"

    @property
    def shape(self) -> str:
        return f"[{self.count:,} times]{self.inner.shape}"

    def smaller(self) -> Iterator[Node]:
        for count in sorted({1, self.count // 8, self.count // 2, self.count * 3 // 4}):
            if 0 < count < self.count:
                yield replace(self, count=count)
        for inner in self.inner.smaller():
            yield replace(self, inner=inner)


@dataclass(frozen=True)
class Open:
    """An object that takes fields of any names, with several that are hostile: it is refused for
    none of them.

    Attributes:
        others: its other fields.
    """

    others: Mapping[str, Json]
    planted: Mapping[str, str]

    @property
    def text(self) -> str:
        return json.dumps({**self.others, **self.planted})

    @property
    def shape(self) -> str:
        return f"{', '.join(f'.{name}' for name in self.planted)} = any"

    def smaller(self) -> Iterator[Node]:
        yield from ()


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        good: fields as they should be.
        bad: fields that are hostile, which win.
    """

    path: str
    good: Mapping[str, Json]
    bad: Mapping[str, Node]

    @property
    def text(self) -> str:
        fields = {name: json.dumps(value) for name, value in self.good.items()}
        fields |= {name: node.text for name, node in self.bad.items()}
        return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}"

    @property
    def body(self) -> bytes:
        return encoded(self.text)

    @property
    def ways(self) -> list[str]:
        """Where it is hostile, and how."""
        return [f"{name}{node.shape}" for name, node in self.bad.items()]

    @property
    def shape(self) -> str:
        """The same in a line."""
        return f"POST {self.path}: {'; '.join(self.ways)} ({len(self.body):,} bytes)"

    def smaller(self) -> Iterator["Request"]:
        """Yield requests to try instead, the smallest first."""
        if len(self.bad) > 1:
            for name in self.bad:
                kept = {other: node for other, node in self.bad.items() if other != name}
                yield replace(self, bad=kept)
        for name, node in self.bad.items():
            for smaller in node.smaller():
                yield replace(self, bad={**self.bad, name: smaller})


def encoded(text: str) -> bytes:
    """Return what is sent, halves of surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass")


def good_of(api: Api, route: Route) -> dict[str, Json]:
    """Return a body that is served, or what its schema needs, of the model that is served."""
    known = GOOD.get(route.path.removesuffix("/render"))
    body = dict(known) if known else api.example(route.schema)
    return (body if isinstance(body, dict) else {}) | MODEL


class Drawing:
    """Draws requests. The same seed and number give the same request."""

    def __init__(self, api: Api, seed: int) -> None:
        self._api = api
        self._seed = seed
        self._routes = [route for route in api.routes if not is_operators(route) and not route.form]

    def request(self, number: int) -> Request:
        """Draw one of at most ``MAX_BYTES``."""
        random = Random(f"{self._seed} {number}")
        route = random.choice(self._routes)
        good = good_of(self._api, route)
        if random.random() < 0.2:
            good["stream"] = True
        fields = self._fields(route)
        odd = random.choice((0.0, 0.05, 0.4))
        wrong = _drawn(random, fields, random.choice((1, 1, 2, 3)))
        bad = {name: self._node(random, fields[name], odd) for name in wrong}
        if random.random() < 0.4:  # what goes well with it may make it worse
            for name in _drawn(random, fields, random.choice((1, 2, 3))):
                bad.setdefault(name, Leaf(self._fitting(random, fields[name])))
        if random.random() < 0.05:
            bad["something"] = self._node(random, {}, odd)
        request = Request(route.path, good, bad)
        while len(request.body) > MAX_BYTES:
            request = _halved(request)
        return request

    def _fields(self, route: Route) -> dict[str, Schema]:
        fields: dict[str, Schema] = {}
        for branch in self._api.branches(route.schema):
            for name, schema in branch.get("properties", {}).items():
                fields.setdefault(name, schema)
        return fields

    def _node(self, random: Random, schema: Schema, odd: float, depth: int = 0) -> Node:
        """Draw a value.

        Args:
            odd: how likely it has another type than it should.
        """
        branch = random.choice(self._api.branches(schema))
        if depth < 7 and random.random() < 0.8:
            if fields := branch.get("properties"):
                name = random.choice(sorted(fields))
                others = self._api.example(branch)
                others = {other: value for other, value in others.items() if other != name}
                return Inside(others, name, self._node(random, fields[name], odd, depth + 1))
            if items := branch.get("items"):
                inner = self._node(random, items, odd, depth + 1)
                return Many(_count(random, inner), inner)
            if isinstance(values := branch.get("additionalProperties"), Mapping):
                name = random.choice(("a", "", "type", "image", "video", "x" * 1000))
                return Inside({}, name, self._node(random, values, odd, depth + 1))
        if random.random() < odd:
            return Leaf(draw(random))
        return Leaf(self._fitting(random, branch))

    def _fitting(self, random: Random, schema: Schema) -> Value:
        """Draw a value of the type that should be there."""
        branch = random.choice(self._api.branches(schema))
        items = branch.get("items")
        units = [self._api.example(each) for each in self._api.branches(items)] if items else []
        return draw(random, branch.get("type", ""), tuple(map(json.dumps, units)))


def _drawn(random: Random, fields: Mapping[str, Schema], count: int) -> list[str]:
    """Draw fields; those of lists and objects, where most can be wrong, rather than others."""
    names = sorted(fields)
    weights = [4 if _is_large(fields[name]) else 1 for name in names]
    return random.choices(names, weights, k=count)


def _is_large(schema: Schema) -> bool:
    text = str(schema)
    return "array" in text or "object" in text or "$ref" in text


def _count(random: Random, inner: Node) -> int:
    room = 900_000 // (len(inner.text) + 1)
    return max(1, min(room, random.choice((1, 1, 20, 255, 2047, 16_000, 1_000_000))))


def _halved(request: Request) -> Request:
    """Make the largest of the hostile fields smaller."""
    name = max(request.bad, key=lambda each: len(request.bad[each].text))
    node = request.bad[name]
    candidates = [each for each in node.smaller() if len(each.text) < len(node.text)]
    best = max(candidates, key=lambda each: len(each.text))
    return replace(request, bad={**request.bad, name: best})
