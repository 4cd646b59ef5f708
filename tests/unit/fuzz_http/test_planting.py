"""Canaries go into all that a client may send."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import vllm
from fastapi import FastAPI, Form, UploadFile
from pydantic import BaseModel

import frontend
from tests.fuzz_http.canaries import Canaries, Touch
from tests.fuzz_http.planting import HEADERS, Plant, Planting
from tests.fuzz_http.schema import Api

OF_HTTP = {
    "connection", "content-length", "content-type", "etag", "location", "retry-after",
    "transfer-encoding", "www-authenticate",
}  # fmt: skip
"""Headers that say how a body is sent, or that answers have."""


class Inner(BaseModel):
    text: str = ""


class Part(BaseModel):
    inner: Inner | None = None
    text: str = ""
    image_url: str = ""


class Asked(BaseModel):
    model: str
    parts: list[str | Part] = []
    other: Part | None = None


class Spoken(BaseModel):
    file: UploadFile
    prompt: str = ""


@pytest.fixture(scope="module")
def api() -> Api:
    app = FastAPI()

    @app.post("/asked")
    async def asked(body: Asked) -> None: ...

    @app.post("/spoken")
    async def spoken(form: Annotated[Spoken, Form()]) -> None: ...

    @app.get("/named/{name}")
    async def named(name: str, last: int = 1) -> None: ...

    return Api(app.openapi())


@pytest.fixture
def plants(api: Api, canaries: Canaries) -> dict[str, list[Plant]]:
    planting = Planting(api, canaries)
    return {call.path: list(planting.plants(call)) for call in api.calls}


def test_each_canary_has_a_number_of_its_own(plants: dict[str, list[Plant]]) -> None:
    numbers = [plant.number for of_route in plants.values() for plant in of_route]
    assert len(numbers) == len(set(numbers))


def test_each_parameter_has_one(plants: dict[str, list[Plant]]) -> None:
    ways = {plant.ways[0].partition(" = ")[0] for plant in plants["/named/{name}"]}
    assert ways == {"name", "last", "something"}
    assert all("{" not in plant.path for plant in plants["/named/{name}"])
    assert all("mmcanary" in plant.path or "gAS" in plant.path for plant in plants["/named/{name}"])


def test_each_place_of_a_form_has_one(plants: dict[str, list[Plant]]) -> None:
    ways = {plant.ways[0].partition(" = ")[0] for plant in plants["/spoken"]}
    assert ways == {
        "file", "filename", "name of a field", "prompt", "something", "type of a part",
    }  # fmt: skip
    assert all(b"mmcanary%d" % plant.number in plant.body or b"gAS" in plant.body
               for plant in plants["/spoken"])  # fmt: skip


def test_each_string_of_a_body_has_one(plants: dict[str, list[Plant]]) -> None:
    ways = {plant.ways[0].partition(" = ")[0] for plant in plants["/asked"]}
    names = ("text", "image_url", "inner.text")
    fields = {f"{place}.{name}" for place in ("parts[1 times]", "other") for name in names}
    assert {"model", "parts[1 times]", "something"} | fields <= ways
    assert all(b"mmcanary%d" % plant.number in plant.body or b"gAS" in plant.body
               for plant in plants["/asked"] if plant.body)  # fmt: skip


def test_of_routes_that_are_known_each_name_has_one(api: Api, canaries: Canaries) -> None:
    (call,) = (each for each in api.calls if each.path == "/asked")
    planting = Planting(api, canaries)
    full, thin = list(planting.plants(call)), list(planting.plants(call))
    fields = ("model", "parts", "text", "image_url")
    names = [
        {name for name in fields if any(name in str(plant) for plant in each)}
        for each in (full, thin)
    ]
    assert names[0] == names[1]
    assert len(thin) < len(full)


@pytest.mark.parametrize(
    ("about", "number"),
    [("/a/mmcanary12.png", 12), ("GET /mmcanary7.png HTTP/1.1", 7), ("/mmcanary/x", None)],
)
def test_what_is_touched_tells_whose_it_was(about: str, number: int | None) -> None:
    assert Touch("open", about).number == number


def test_each_header_that_is_read_has_one() -> None:
    """One that the next vLLM reads joins ``HEADERS``."""
    roots = (Path(vllm.__file__).parent / "entrypoints", Path(frontend.__file__).parent)
    read = {name for root in roots for file in root.rglob("*.py") for name in _headers(file)}
    assert {"x-request-id", "content-encoding", "x-api-key"} <= read
    assert read - OF_HTTP - set(HEADERS) == set()


def _headers(file: Path) -> Iterator[str]:
    """The names by which something called headers is asked."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=whose, attr="get"), args=[ast.Constant(name), *_]
            ):
                asked: Any = name
            case ast.Subscript(value=whose, slice=ast.Constant(name)):
                asked = name
            case _:
                continue
        of = ast.unparse(whose).rpartition(".")[2].lower()
        if isinstance(asked, str) and re.search(r"^(\w+_)?headers\b", of) and "allowed" not in of:
            yield asked.lower()
