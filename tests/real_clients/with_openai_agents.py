"""OpenAI's Agents SDK: runs with pictures, tools, streams and structured outputs.

With Responses it takes an answer that was cut off for an error, so those here have an end.
"""

from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()
set_tracing_disabled(True)


class Paint(BaseModel):
    colour: Literal["red", "blue"]


@function_tool  # type: ignore[untyped-decorator] # not installed where types are checked
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Say the weather of a city."""
    return f"rain in {city}"


def agent(at: Endpoint, tokens: int = 8, chat: bool = False, **more: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=f"{at.url}/v1", api_key=at.key, max_retries=0)
    model: Any = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
    settings = more.pop("settings", ModelSettings(max_tokens=tokens))
    made = model(at.model, client)
    return Agent("one", instructions="Be brief.", model=made, model_settings=settings, **more)


def shown(at: Endpoint) -> list[Any]:
    text = {"type": "input_text", "text": "What is this?"}
    image = {"type": "input_image", "image_url": at.picture, "detail": "auto"}
    return [{"role": "user", "content": [text, image]}]


@case
async def text_by_chat(at: Endpoint) -> object:
    return (await Runner.run(agent(at, chat=True), "Hello")).final_output


@case
async def two_turns(at: Endpoint) -> object:
    one = agent(at, 64, output_type=Paint)
    first = await Runner.run(one, "A colour")
    again = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
    return (await Runner.run(one, again)).final_output.model_dump()


@case
async def stream(at: Endpoint) -> object:
    run = Runner.run_streamed(agent(at), "Hello")
    return sorted({event.type async for event in run.stream_events()})


@case
async def picture(at: Endpoint) -> object:
    run = await Runner.run(agent(at, 64, output_type=Paint), shown(at))
    return run.final_output.model_dump()


@case
async def picture_by_chat(at: Endpoint) -> object:
    return (await Runner.run(agent(at, chat=True), shown(at))).final_output


@case
async def structured(at: Endpoint) -> object:
    run = await Runner.run(agent(at, 64, output_type=Paint), "A colour")
    return run.final_output.model_dump()


@case
async def tool(at: Endpoint) -> object:
    settings = ModelSettings(max_tokens=512, tool_choice="required")
    one = agent(
        at, tools=[weather], settings=settings, chat=True, tool_use_behavior="stop_on_first_tool"
    )
    run = await Runner.run(one, "Weather?")
    assert str(run.final_output).startswith("rain in "), run.final_output
    return run.final_output


if __name__ == "__main__":
    main(case, {"openai-agents": version("openai-agents")})
