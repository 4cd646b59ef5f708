"""instructor, in the modes that its users choose."""

from importlib.metadata import version
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()


class Paint(BaseModel):
    colour: Literal["red", "blue"]


def made(at: Endpoint, mode: instructor.Mode, content: Any = "A colour") -> object:
    client = instructor.from_openai(OpenAI(base_url=f"{at.url}/v1", api_key=at.key), mode=mode)
    paint = client.chat.completions.create(
        model=at.model,
        messages=[{"role": "user", "content": content}],
        response_model=Paint,
        max_retries=0,
        max_tokens=512,  # spaces within JSON are chosen at random
    )
    return paint.model_dump()


@case
def by_schema(at: Endpoint) -> object:
    return made(at, instructor.Mode.JSON_SCHEMA)


@case
def by_a_tool(at: Endpoint) -> object:
    return made(at, instructor.Mode.TOOLS)


@case
def by_a_strict_tool(at: Endpoint) -> object:
    return made(at, instructor.Mode.TOOLS_STRICT)


@case
def of_a_picture(at: Endpoint) -> object:
    seen = ["What colour?", instructor.Image.from_base64(at.picture)]
    return made(at, instructor.Mode.JSON_SCHEMA, seen)


if __name__ == "__main__":
    main(case, {"instructor": version("instructor")})
