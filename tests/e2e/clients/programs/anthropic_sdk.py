"""Anthropic's SDK, as users call it: Messages with pictures, streams, tools, counting, errors."""

import asyncio
from typing import Any

import anthropic

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, cancel_once, in_turn, main

case = Cases()

QUESTION: Any = [{"role": "user", "content": "Tell me about the river."}]
TOOLS: Any = [
    {
        "name": "paint",
        "description": "Paint.",
        "input_schema": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
        },
    }
]


ADDED = {"text", "input_json"}
"""What the SDK puts between the events of a server: one after each piece."""


def client_of(at: Endpoint) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=at.url, auth_token=at.key, max_retries=0, timeout=120)


def options_of(at: Endpoint, messages: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The SDK has no ``temperature`` any more, so it goes the way of all that is not in there."""
    common = {"model": at.model, "messages": messages, "max_tokens": 6}
    return common | {"extra_body": {"temperature": 0}} | options


def ask(at: Endpoint, messages: Any = QUESTION, **options: Any) -> Any:
    with client_of(at) as client:
        return client.messages.create(**options_of(at, messages, options))


def stream(at: Endpoint, messages: Any = QUESTION, **options: Any) -> object:
    with (
        client_of(at) as client,
        client.messages.stream(**options_of(at, messages, options)) as events,
    ):
        kinds = in_turn(event.type for event in events if event.type not in ADDED)
        return {"kinds": kinds, "final": whole(events.get_final_message())}


def whole(message: Any) -> object:
    """What users see of a message."""
    return {
        "content": [
            (block.type, block.text if block.type == "text" else (block.name, block.input))
            for block in message.content
        ],
        "stop": message.stop_reason,
        "tokens": [message.usage.input_tokens, message.usage.output_tokens],
        "role": message.role,
        "model": message.model,
    }


def showing(source: dict[str, str]) -> Any:
    shown = {"type": "image", "source": source}
    return [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}]


def inline(at: Endpoint) -> Any:
    data = at.picture.partition(",")[2]
    return showing({"type": "base64", "media_type": "image/png", "data": data})


@case
def text(at: Endpoint) -> object:
    return whole(ask(at))


@case
def a_system_prompt(at: Endpoint) -> object:
    return whole(ask(at, system="Be brief."))


@case
def a_conversation(at: Endpoint) -> object:
    said = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on."}]
    return whole(ask(at, QUESTION + said))


@case
def a_picture(at: Endpoint) -> object:
    return whole(ask(at, inline(at)))


@case
def a_picture_by_url(at: Endpoint) -> object:
    return whole(ask(at, showing({"type": "url", "url": f"{at.pictures}/sdk.png"})))


@case
def a_stream(at: Endpoint) -> object:
    return stream(at)


@case
def a_stream_about_a_picture(at: Endpoint) -> object:
    return stream(at, inline(at))


@case
def a_stop_sequence(at: Endpoint) -> object:
    first = ask(at).content[0].text[:1]
    return whole(ask(at, stop_sequences=[first]))


@case
def a_tool(at: Endpoint) -> object:
    return whole(ask(at, tools=TOOLS, tool_choice={"type": "tool", "name": "paint"}, max_tokens=60))


@case
def a_tool_in_a_stream(at: Endpoint) -> object:
    choice = {"type": "tool", "name": "paint"}
    return stream(at, tools=TOOLS, tool_choice=choice, max_tokens=60)


@case
def what_a_tool_said(at: Endpoint) -> object:
    use = {"type": "tool_use", "id": "t1", "name": "paint", "input": {"colour": "red"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "done"}
    said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return whole(ask(at, QUESTION + said, tools=TOOLS))


@case
def counting(at: Endpoint) -> object:
    with client_of(at) as client:
        return client.messages.count_tokens(model=at.model, messages=inline(at)).input_tokens


@case
def models(at: Endpoint) -> object:
    with client_of(at) as client:
        return [model.id for model in client.models.list()]


@case
def an_unknown_model(at: Endpoint) -> object:
    return ask(at, model="nobody")


@case
def a_stream_of_an_unknown_model(at: Endpoint) -> object:
    return stream(at, model="nobody")


@case
def a_question_that_is_too_long(at: Endpoint) -> object:
    return ask(at, [{"role": "user", "content": "river " * 5000}])


@case
def a_stream_whose_question_is_too_long(at: Endpoint) -> object:
    return stream(at, [{"role": "user", "content": "river " * 5000}])


@case
def an_answer_that_would_be_too_long(at: Endpoint) -> object:
    return ask(at, max_tokens=100_000)


@case
def no_tokens(at: Endpoint) -> object:
    return ask(at, max_tokens=0)


@case
def a_negative_temperature(at: Endpoint) -> object:
    return ask(at, extra_body={"temperature": -1})


@case
def a_broken_picture(at: Endpoint) -> object:
    return ask(at, showing({"type": "base64", "media_type": "image/png", "data": "bm9uZQ=="}))


@case
def a_stream_about_a_broken_picture(at: Endpoint) -> object:
    return stream(at, showing({"type": "base64", "media_type": "image/png", "data": "bm9uZQ=="}))


@case
def a_picture_that_is_not_there(at: Endpoint) -> object:
    return ask(at, showing({"type": "url", "url": f"{at.pictures}/missing.png"}))


@case
def an_unknown_block(at: Endpoint) -> object:
    return ask(at, [{"role": "user", "content": [{"type": "smell"}]}])


@case
def a_batch(at: Endpoint) -> object:
    with client_of(at) as client:
        return client.messages.batches.list().data


@case
def an_answer_that_takes_too_long(at: Endpoint) -> object:
    with client_of(at) as client:
        # Long, or it may be there when a client that did not get its turn looks for it.
        given = options_of(at, QUESTION, {"max_tokens": 500})
        return client.with_options(timeout=0.001).messages.create(**given)


@case
async def an_asynchronous_stream(at: Endpoint) -> object:
    async with (
        anthropic.AsyncAnthropic(base_url=at.url, auth_token=at.key, max_retries=0) as client,
        client.messages.stream(**options_of(at, inline(at), {})) as events,
    ):
        return "".join([piece async for piece in events.text_stream])


@case
async def a_task_that_is_cancelled(at: Endpoint) -> object:
    """And the same client is asked again."""
    async with anthropic.AsyncAnthropic(
        base_url=at.url, auth_token=at.key, max_retries=0
    ) as client:
        long = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        first = asyncio.Event()

        async def read() -> None:
            async with client.messages.stream(**options_of(at, QUESTION, long)) as events:
                async for _ in events:
                    first.set()

        cancelled = await cancel_once(first, asyncio.create_task(read()))
        return [cancelled, whole(await client.messages.create(**options_of(at, QUESTION, {})))]


if __name__ == "__main__":
    main(case, {"anthropic": anthropic.__version__})
