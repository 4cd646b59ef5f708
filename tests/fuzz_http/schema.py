"""The bodies that a frontend's routes take, from its own ``/openapi.json``.

FastAPI makes that from the routes and from vLLM's pydantic models, so a route or a field of the
next vLLM is fuzzed as soon as it is there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
Json: TypeAlias = Any

_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_UNTYPED: Final = ("/invocations",)
"""Routes that read their body themselves and hand it to another route's model."""

OPERATORS: Final = ("/mmrouter/", "/start_profile", "/v1/load_lora", "/v1/unload_lora")
"""Routes by which operators have workers do something. They are judged in the same way, but must
not be drawn at random: a worker that pauses fails what others ask."""


@dataclass(frozen=True)
class Route:
    """A route that takes a body.

    Attributes:
        schema: of the body.
        form: whether the body is a form, and not JSON.
    """

    path: str
    schema: Schema
    form: bool = False


@dataclass(frozen=True)
class Call:
    """A method of a route.

    Attributes:
        parameters: of the path, the query and the head, by OpenAPI.
    """

    method: str
    path: str
    parameters: tuple[Schema, ...] = ()


class Api:
    """What the frontend says of itself."""

    def __init__(self, description: Schema) -> None:
        """
        Args:
            description: what ``/openapi.json`` has.
        """
        self._named: Schema = description.get("components", {}).get("schemas", {})
        self.routes = tuple(self._routes(description["paths"]))
        self.calls = tuple(
            Call(method.upper(), path, tuple(each.get("parameters", ())))
            for path, methods in description["paths"].items()
            for method, each in methods.items()
        )

    def resolve(self, schema: Schema) -> Schema:
        """Follow references."""
        while (name := schema.get("$ref")) is not None:
            schema = self._named[name.rsplit("/", 1)[1]]
        return schema

    def branches(self, schema: Schema) -> list[Schema]:
        """Return what a value of the schema may be, unions within unions included."""
        schema = self.resolve(schema)
        for word in _BRANCHES:
            if inner := schema.get(word):
                return [branch for each in inner for branch in self.branches(each)]
        return [schema]

    def example(self, schema: Schema, depth: int = 0) -> Json:
        """Return a small value that the schema allows. The same each time."""
        for branch in self.branches(schema):
            if branch.get("type") != "null":
                return self._example_of(branch, depth)
        return None

    def _routes(self, paths: Schema) -> Iterator[Route]:
        typed = []
        for path, methods in paths.items():
            post = methods.get("post", {})
            for kind, content in post.get("requestBody", {}).get("content", {}).items():
                form = kind != "application/json"
                typed.append(Route(path, content["schema"], form))
        yield from typed
        bodies = [route.schema for route in typed if not route.form and not is_operators(route)]
        for path in _UNTYPED:
            if path in paths:
                yield Route(path, {"anyOf": bodies})

    def _example_of(self, schema: Schema, depth: int) -> Json:
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        match schema.get("type"):
            case "object":
                fields = schema.get("properties", {})
                required = schema.get("required", ()) if depth < 8 else ()
                return {name: self.example(fields[name], depth + 1) for name in required}
            case "array":
                least = schema.get("minItems", 0)
                return [self.example(schema.get("items", {}), depth + 1)] * least
            case "string":
                return "x" * max(1, schema.get("minLength", 1))
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
            case "boolean":
                return False
            case _:
                return "x"


def is_operators(route: Route) -> bool:
    """Whether a route is for operators."""
    return route.path.startswith(OPERATORS)
