"""pydantic-ai: calls, streams, pictures, tools, structured outputs."""

import base64
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ImageUrl
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()

FEW = ModelSettings(max_tokens=8, temperature=0)


class Paint(BaseModel):
    colour: Literal["red", "blue"]


def chat(at: Endpoint) -> OpenAIChatModel:
    return OpenAIChatModel(
        at.model, provider=OpenAIProvider(base_url=f"{at.url}/v1", api_key=at.key)
    )


@case
async def text(at: Endpoint) -> object:
    return (await Agent(chat(at), model_settings=FEW).run("Hello")).output


@case
async def two_turns(at: Endpoint) -> object:
    agent = Agent(chat(at), instructions="Be brief.", model_settings=FEW)
    first = await agent.run("Hello")
    return (await agent.run("And now?", message_history=first.all_messages())).output


@case
async def stream(at: Endpoint) -> object:
    async with Agent(chat(at), model_settings=FEW).run_stream("Hello") as answer:
        return [each async for each in answer.stream_text(delta=True)]


@case
async def picture(at: Endpoint) -> object:
    return (await Agent(chat(at), model_settings=FEW).run(["What?", ImageUrl(at.picture)])).output


@case
async def picture_as_bytes(at: Endpoint) -> object:
    data = base64.b64decode(at.picture.partition(",")[2])
    content = ["What?", BinaryContent(data, media_type="image/png")]
    return (await Agent(chat(at), model_settings=FEW).run(content)).output


@case
async def structured(at: Endpoint) -> object:
    agent = Agent(chat(at), output_type=NativeOutput(Paint), model_settings={"max_tokens": 64})
    return (await agent.run("A colour")).output.model_dump()


@case
async def structured_by_a_tool(at: Endpoint) -> object:
    agent = Agent(chat(at), output_type=Paint, model_settings={"max_tokens": 512})
    return (await agent.run("A colour")).output.model_dump()


@case
async def responses(at: Endpoint) -> object:
    provider = OpenAIProvider(base_url=f"{at.url}/v1", api_key=at.key)
    model = OpenAIResponsesModel(at.model, provider=provider)
    return (await Agent(model, model_settings=FEW).run("Hello")).output


if __name__ == "__main__":
    main(case, {"pydantic-ai-slim": version("pydantic-ai-slim")})
