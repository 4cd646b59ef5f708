"""What is drawn from schemas: the same for the same seed, JSON, small enough, everywhere."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from tests.fuzz_http.canaries import MARK, Canaries
from tests.fuzz_http.hostile import KINDS, Value
from tests.fuzz_http.planting import Planting
from tests.fuzz_http.requests import (
    MAX_BYTES,
    Drawing,
    Inside,
    Leaf,
    Many,
    Node,
    Request,
)
from tests.fuzz_http.schema import Api


class Part(BaseModel):
    type: Literal["text"]
    text: str
    inner: "Part | None" = None


class Asked(BaseModel):
    model: str
    parts: list[str | Part] = []
    options: dict[str, Any] = {}
    count: int = 1


@pytest.fixture(scope="module")
def api() -> Api:
    app = FastAPI()

    @app.post("/asked")
    async def asked(body: Asked) -> None: ...

    @app.post("/invocations")
    async def invocations() -> None: ...

    return Api(app.openapi())


def drawn(api: Api, seed: int = 1, count: int = 100) -> Iterator[Request]:
    drawing = Drawing(api, seed)
    return (drawing.request(number) for number in range(count))


def test_routes_that_say_no_schema_have_that_of_the_others(api: Api) -> None:
    assert [route.path for route in api.routes] == ["/asked", "/invocations"]
    assert api.example(api.routes[0].schema) == {"model": "x"}


def test_the_same_seed_draws_the_same(api: Api) -> None:
    bodies = [request.body for request in drawn(api)]
    assert bodies == [request.body for request in drawn(api)]
    assert bodies != [request.body for request in drawn(api, seed=2)]
    assert Drawing(api, 1).request(70).body == bodies[70]


def test_what_is_drawn_is_json_and_not_too_large(api: Api) -> None:
    for request in drawn(api):
        assert len(request.body) <= MAX_BYTES
        try:
            json.loads(request.body)
        except RecursionError:
            assert " in " in request.shape
        except ValueError as error:
            assert "4300 digits" in str(error)


def test_each_field_is_drawn_also_within_others(api: Api) -> None:
    shapes = " ".join(way for request in drawn(api, count=1000) for way in request.ways)
    for way in (
        "model =",
        "count =",
        "options",
        "parts[1 times].text =",
        ".inner.text =",
        "parts =",
    ):
        assert way in shapes
    assert "something" in shapes


@pytest.mark.parametrize("kind", [*KINDS])
def test_what_is_smaller_ends(kind: str) -> None:
    node: Node = Inside({"a": 1}, "b", Many(100, Leaf(Value(kind, "1", 64))))
    steps = 0
    while smaller := next(iter(node.smaller()), None):
        assert len(smaller.text) < len(node.text)
        node, steps = smaller, steps + 1
    assert steps < 50


def test_a_request_is_smaller_without_one_of_its_fields() -> None:
    request = Request("/asked", {}, {"a": Leaf(Value("literal", "1")), "b": Leaf(Value("text"))})
    smaller = list(request.smaller())
    assert [[*each.bad] for each in smaller[:2]] == [["b"], ["a"]]


def test_a_canary_is_planted_in_each_string(api: Api, canaries: Canaries) -> None:
    requests = list(Planting(api, canaries).requests(api.routes[0]))
    ways = {way.partition(" = ")[0] for request in requests for way in request.ways}
    assert {"model", "parts[1 times]", "parts[1 times].text", "something"} <= ways
    assert any(way.startswith("options.a, .a") for way in ways)
    assert all(MARK in request.text or "CANARYPICKLE" in request.text for request in requests)
