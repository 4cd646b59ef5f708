"""LiteLLM's SDK: both of its providers for servers like ours, streams, pictures, tools, errors."""

from importlib.metadata import version
from typing import Any

import litellm

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, in_turn, main

case = Cases()

litellm.suppress_debug_info = True
litellm.telemetry = False

QUESTION: Any = [{"role": "user", "content": "Tell me about the river."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def options_of(at: Endpoint, messages: Any, options: dict[str, Any]) -> dict[str, Any]:
    common = {
        "model": f"hosted_vllm/{at.model}",
        "api_base": f"{at.url}/v1",
        "api_key": at.key,
        "messages": messages,
        "max_tokens": 6,
        "temperature": 0,
        "num_retries": 0,
    }
    return common | options


def ask(at: Endpoint, messages: Any = QUESTION, **options: Any) -> Any:
    return litellm.completion(**options_of(at, messages, options))


def whole(reply: Any) -> object:
    """What users see of a completion."""
    (choice,) = reply.choices
    calls = choice.message.tool_calls or []
    return {
        "text": choice.message.content,
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "finish": choice.finish_reason,
        "tokens": reply.usage.total_tokens,
        "model": reply.model,
    }


def streamed(chunks: list[Any]) -> object:
    kinds = []
    for chunk in chunks:
        for choice in chunk.choices:
            kinds += ["text"] if choice.delta.content else []
            kinds += [choice.finish_reason] if choice.finish_reason else []
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usages = [u.total_tokens for chunk in chunks if (u := getattr(chunk, "usage", None))]
    return {"text": text, "kinds": in_turn(kinds), "usage": usages[-1:]}


def showing(url: str) -> Any:
    shown = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}]


@case
def text(at: Endpoint) -> object:
    return whole(ask(at))


@case
def by_openais_provider(at: Endpoint) -> object:
    return whole(ask(at, model=f"openai/{at.model}"))


@case
def a_picture(at: Endpoint) -> object:
    return whole(ask(at, showing(at.picture)))


@case
def a_picture_by_url(at: Endpoint) -> object:
    return whole(ask(at, showing(f"{at.pictures}/sdk.png")))


@case
def a_stream(at: Endpoint) -> object:
    return streamed(list(ask(at, stream=True, stream_options={"include_usage": True})))


@case
async def asynchronously(at: Endpoint) -> object:
    reply = await litellm.acompletion(**options_of(at, QUESTION, {}))
    stream = await litellm.acompletion(**options_of(at, showing(at.picture), {"stream": True}))
    return [whole(reply), streamed([chunk async for chunk in stream])]


@case
def a_structured_answer(at: Endpoint) -> object:
    schema = {"type": "json_schema", "json_schema": {"name": "painting", "schema": SCHEMA}}
    return whole(ask(at, response_format=schema, max_tokens=60))


@case
def a_tool(at: Endpoint) -> object:
    tools = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]
    return whole(ask(at, tools=tools, tool_choice="required", max_tokens=60))


@case
def a_completion(at: Endpoint) -> object:
    reply: Any = litellm.text_completion(
        model=f"hosted_vllm/{at.model}",
        api_base=f"{at.url}/v1",
        api_key=at.key,
        prompt="Once",
        max_tokens=6,
        temperature=0,
    )
    return reply.choices[0].text


@case
def a_response(at: Endpoint) -> object:
    reply: Any = litellm.responses(
        model=f"openai/{at.model}",
        api_base=f"{at.url}/v1",
        api_key=at.key,
        input="Tell me.",
        max_output_tokens=6,
        temperature=0,
    )
    return reply.output[-1].content[0].text


@case
def an_unknown_model(at: Endpoint) -> object:
    return whole(ask(at, model="hosted_vllm/nobody"))


@case
def a_question_that_is_too_long(at: Endpoint) -> object:
    return whole(ask(at, [{"role": "user", "content": "river " * 5000}]))


@case
def a_broken_picture(at: Endpoint) -> object:
    return whole(ask(at, showing("data:image/png;base64,bm9uZQ==")))


@case
def a_broken_picture_in_a_stream(at: Endpoint) -> object:
    return streamed(list(ask(at, showing("data:image/png;base64,bm9uZQ=="), stream=True)))


@case
def an_answer_that_takes_too_long(at: Endpoint) -> object:
    return whole(ask(at, timeout=0.001, max_tokens=500))


if __name__ == "__main__":
    main(case, {name: version(name) for name in ("litellm", "openai")})
