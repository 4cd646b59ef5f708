"""OpenAI's SDK, as users call it: sync, async, streams, pictures, tools, structures, Responses.

Runs with version 2, which LangChain and LiteLLM bring, and with version 3.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, cancel_once, in_turn, main

case = Cases()

QUESTION: Any = [{"role": "user", "content": "Tell me about the river."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "paint", "description": "Paint.", "parameters": SCHEMA},
    }
]
FLAT_TOOLS: Any = [{"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}]
SHORT: Any = {"max_tokens": 6, "temperature": 0}
LONG = "river " * 5000


class Painting(BaseModel):
    colour: Literal["red", "blue"]


def client_of(at: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{at.url}/v1", api_key=at.key, max_retries=0, timeout=120)


def async_client_of(at: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=at.key, max_retries=0, timeout=120)


def showing(*urls: str) -> Any:
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}]


def chat(at: Endpoint, messages: Any = QUESTION, **options: Any) -> Any:
    """One completion; a stream of them with ``stream=True``."""
    with client_of(at) as client:
        options = {"model": at.model, "messages": messages} | SHORT | options
        reply = client.chat.completions.create(**options)
        return list(reply) if options.get("stream") else reply


def whole(reply: Any) -> object:
    """What users see of a completion."""
    usage = reply.usage
    return {
        "texts": [choice.message.content for choice in reply.choices],
        "finish": [choice.finish_reason for choice in reply.choices],
        "calls": [
            [
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or []
            ]
            for choice in reply.choices
        ],
        "tokens": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
        "model": reply.model,
        "object": reply.object,
    }


def kinds_of(chunks: Iterable[Any]) -> list[str]:
    """The order in which a stream brings its parts."""
    kinds = []
    for chunk in chunks:
        if not chunk.choices:
            kinds.append("usage" if chunk.usage else "nothing")
        for choice in chunk.choices:
            delta = choice.delta
            kinds += ["role"] if delta.role else []
            kinds += ["text"] if delta.content else []
            kinds += ["call"] if delta.tool_calls else []
            kinds += [choice.finish_reason] if choice.finish_reason else []
    return in_turn(kinds)


def streamed(chunks: list[Any]) -> object:
    """What users see of a stream, each choice by itself since they come as they are made."""
    texts: dict[int, str] = {}
    calls: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        for call in choice.delta.tool_calls or []:
            known = calls.get(call.index, "")
            calls[call.index] = known + (call.function.name or "") + (call.function.arguments or "")
    usages = [chunk.usage.total_tokens for chunk in chunks if chunk.usage]
    kinds = kinds_of(chunks) if len(texts) == 1 else sorted(set(kinds_of(chunks)))
    return {"texts": texts, "calls": calls, "usage": usages[-1:], "kinds": kinds}


@case
def models(at: Endpoint) -> object:
    return [(model.id, model.object) for model in client_of(at).models.list()]


@case
def one_model(at: Endpoint) -> object:
    return client_of(at).models.retrieve(at.model).id


@case
def no_such_model(at: Endpoint) -> object:
    return client_of(at).models.retrieve("nobody")


@case
def text(at: Endpoint) -> object:
    return whole(chat(at))


@case
def a_picture(at: Endpoint) -> object:
    return whole(chat(at, showing(at.picture)))


@case
def a_picture_by_url(at: Endpoint) -> object:
    return whole(chat(at, showing(f"{at.pictures}/sdk.png")))


@case
def two_pictures(at: Endpoint) -> object:
    return whole(chat(at, showing(f"{at.pictures}/sdk.png", at.picture)))


@case
def several_answers(at: Endpoint) -> object:
    return whole(chat(at, n=2, seed=3, temperature=1.0))


@case
def log_probabilities(at: Endpoint) -> object:
    (choice,) = chat(at, logprobs=True, top_logprobs=2).choices
    return [
        (each.token, [top.token for top in each.top_logprobs]) for each in choice.logprobs.content
    ]


@case
def an_empty_answer(at: Endpoint) -> object:
    first = chat(at).choices[0].message.content[:1]
    return whole(chat(at, stop=[first]))


@case
def an_empty_question(at: Endpoint) -> object:
    return whole(chat(at, [{"role": "user", "content": ""}]))


@case
def a_new_name_for_max_tokens(at: Endpoint) -> object:
    with client_of(at) as client:
        return whole(
            client.chat.completions.create(
                model=at.model, messages=QUESTION, max_completion_tokens=3, temperature=0
            )
        )


@case
def options_that_nobody_knows(at: Endpoint) -> object:
    return whole(chat(at, user="me", metadata={"a": "b"}, extra_body={"made_up": 1}))


@case
def a_stream(at: Endpoint) -> object:
    return streamed(chat(at, stream=True))


@case
def a_stream_with_usage(at: Endpoint) -> object:
    return streamed(chat(at, stream=True, stream_options={"include_usage": True}))


@case
def a_stream_about_a_picture(at: Endpoint) -> object:
    return streamed(chat(at, showing(at.picture), stream=True))


@case
def a_stream_of_several_answers(at: Endpoint) -> object:
    return streamed(chat(at, stream=True, n=2, seed=3, temperature=1.0))


@case
def a_stream_with_log_probabilities(at: Endpoint) -> object:
    chunks = chat(at, stream=True, logprobs=True, top_logprobs=1)
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    return [each.token for choice in choices for each in choice.logprobs.content]


@case
def an_empty_stream(at: Endpoint) -> object:
    first = chat(at).choices[0].message.content[:1]
    return streamed(chat(at, stream=True, stop=[first]))


@case
def a_tool(at: Endpoint) -> object:
    named = {"type": "function", "function": {"name": "paint"}}
    return whole(chat(at, tools=TOOLS, tool_choice=named, max_tokens=60))


@case
def a_tool_in_a_stream(at: Endpoint) -> object:
    return streamed(chat(at, tools=TOOLS, tool_choice="required", max_tokens=60, stream=True))


@case
def what_a_tool_said(at: Endpoint) -> object:
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    return whole(chat(at, [*QUESTION, *said], tools=TOOLS))


@case
def a_structured_answer(at: Endpoint) -> object:
    with client_of(at) as client:
        reply = client.chat.completions.parse(
            model=at.model,
            messages=QUESTION,
            response_format=Painting,
            max_tokens=60,
            temperature=0,
        )
        parsed = reply.choices[0].message.parsed
        return parsed and parsed.colour


@case
def a_structured_stream(at: Endpoint) -> object:
    with (
        client_of(at) as client,
        client.chat.completions.stream(
            model=at.model,
            messages=QUESTION,
            response_format=Painting,
            max_tokens=60,
            temperature=0,
        ) as stream,
    ):
        kinds = sorted({event.type for event in stream})
        parsed = stream.get_final_completion().choices[0].message.parsed
        return {"kinds": kinds, "colour": parsed and parsed.colour}


@case
def a_json_object(at: Endpoint) -> object:
    return whole(chat(at, response_format={"type": "json_object"}))


@case
def a_completion(at: Endpoint) -> object:
    with client_of(at) as client:
        reply = client.completions.create(model=at.model, prompt="Once", echo=True, **SHORT)
        return [(choice.text, choice.finish_reason) for choice in reply.choices]


@case
def a_completion_in_a_stream(at: Endpoint) -> object:
    with client_of(at) as client:
        chunks = client.completions.create(model=at.model, prompt="Once", stream=True, **SHORT)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)


# Responses


def respond(at: Endpoint, question: Any = "Tell me.", **options: Any) -> Any:
    with client_of(at) as client:
        options = {"max_output_tokens": 6, "temperature": 0} | options
        reply = client.responses.create(model=at.model, input=question, **options)
        return list(reply) if options.get("stream") else reply


@case
def a_response(at: Endpoint) -> object:
    reply = respond(at)
    return [reply.output_text, reply.status, reply.usage.total_tokens]


@case
def a_response_about_a_picture(at: Endpoint) -> object:
    shown = {"type": "input_image", "image_url": at.picture, "detail": "auto"}
    asked = {"type": "input_text", "text": "What is this?"}
    return respond(at, [{"role": "user", "content": [shown, asked]}]).output_text


@case
def a_response_in_a_stream(at: Endpoint) -> object:
    events = respond(at, stream=True)
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    return {"kinds": in_turn(event.type for event in events), "text": said}


@case
def a_response_with_instructions(at: Endpoint) -> object:
    return respond(at, instructions="Be brief.").output_text


@case
def a_response_with_a_tool(at: Endpoint) -> object:
    reply = respond(at, tools=FLAT_TOOLS, tool_choice="required", max_output_tokens=60)
    return [(each.type, getattr(each, "arguments", None)) for each in reply.output]


@case
def a_structured_response(at: Endpoint) -> object:
    with client_of(at) as client:
        reply = client.responses.parse(
            model=at.model,
            input="Tell me.",
            text_format=Painting,
            max_output_tokens=60,
            temperature=0,
        )
        return reply.output_parsed and reply.output_parsed.colour


@case
def a_response_that_nobody_kept(at: Endpoint) -> object:
    return client_of(at).responses.retrieve("resp_none")


@case
def a_response_after_one_that_nobody_kept(at: Endpoint) -> object:
    return respond(at, previous_response_id="resp_none")


@case
def a_response_of_an_unknown_model(at: Endpoint) -> object:
    with client_of(at) as client:
        return client.responses.create(model="nobody", input="Tell me.")


@case
def a_response_about_a_broken_picture(at: Endpoint) -> object:
    shown = {"type": "input_image", "image_url": BROKEN, "detail": "auto"}
    return respond(at, [{"role": "user", "content": [shown]}])


# Errors

BROKEN = "data:image/png;base64,bm9uZQ=="


@case
def an_unknown_model(at: Endpoint) -> object:
    return chat(at, model="nobody")


@case
def a_stream_of_an_unknown_model(at: Endpoint) -> object:
    return chat(at, model="nobody", stream=True)


@case
def a_question_that_is_too_long(at: Endpoint) -> object:
    return chat(at, [{"role": "user", "content": LONG}])


@case
def a_stream_whose_question_is_too_long(at: Endpoint) -> object:
    return chat(at, [{"role": "user", "content": LONG}], stream=True)


@case
def an_answer_that_would_be_too_long(at: Endpoint) -> object:
    return chat(at, max_tokens=100_000)


@case
def a_negative_temperature(at: Endpoint) -> object:
    return chat(at, temperature=-1)


@case
def no_answers(at: Endpoint) -> object:
    return chat(at, n=0)


@case
def no_messages(at: Endpoint) -> object:
    return chat(at, [])


@case
def an_unknown_role(at: Endpoint) -> object:
    return whole(chat(at, [{"role": "nobody", "content": "hello"}]))


@case
def a_message_of_another_type(at: Endpoint) -> object:
    return chat(at, "hello")


@case
def an_unknown_part(at: Endpoint) -> object:
    return chat(at, [{"role": "user", "content": [{"type": "smell", "smell": "roses"}]}])


@case
def a_broken_picture(at: Endpoint) -> object:
    return chat(at, showing(BROKEN))


@case
def a_stream_about_a_broken_picture(at: Endpoint) -> object:
    return chat(at, showing(BROKEN), stream=True)


@case
def a_picture_that_is_not_there(at: Endpoint) -> object:
    return chat(at, showing(f"{at.pictures}/missing.png"))


@case
def a_picture_by_ftp(at: Endpoint) -> object:
    return chat(at, showing("ftp://127.0.0.1/picture.png"))


@case
def a_picture_of_no_url(at: Endpoint) -> object:
    return chat(at, showing("picture.png"))


@case
def too_many_pictures(at: Endpoint) -> object:
    return chat(at, showing(*[at.picture] * 5))


@case
def a_film_for_who_sees_pictures(at: Endpoint) -> object:
    return chat(at, [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])


@case
def a_schema_that_is_none(at: Endpoint) -> object:
    schema = {"name": "x", "schema": {"type": "nothing"}}
    return chat(at, response_format={"type": "json_schema", "json_schema": schema})


@case
def an_unknown_response_format(at: Endpoint) -> object:
    return chat(at, response_format={"type": "verse"})


@case
def a_tool_that_is_not_there(at: Endpoint) -> object:
    return chat(at, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "cut"}})


@case
def a_choice_without_tools(at: Endpoint) -> object:
    return chat(at, tool_choice="required")


@case
def too_many_log_probabilities(at: Endpoint) -> object:
    return chat(at, logprobs=True, top_logprobs=1000)


@case
def options_of_a_stream_without_one(at: Endpoint) -> object:
    return chat(at, stream_options={"include_usage": True})


@case
def tokens_that_are_none(at: Endpoint) -> object:
    with client_of(at) as client:
        return client.completions.create(model=at.model, prompt=[10_000_000], **SHORT)


@case
def embeddings(at: Endpoint) -> object:
    return client_of(at).embeddings.create(model=at.model, input="x")


@case
def a_picture_to_make(at: Endpoint) -> object:
    return client_of(at).images.generate(model=at.model, prompt="x")


@case
def a_path_that_is_not_there(at: Endpoint) -> object:
    return client_of(at).get("/nowhere", cast_to=object)


@case
def a_method_that_is_not_there(at: Endpoint) -> object:
    return client_of(at).get("/chat/completions", cast_to=object)


@case
def a_body_that_is_a_list(at: Endpoint) -> object:
    return client_of(at).post("/chat/completions", body=[1, 2], cast_to=object)


@case
def an_answer_that_takes_too_long(at: Endpoint) -> object:
    with client_of(at) as client:
        return client.with_options(timeout=0.001).chat.completions.create(
            model=at.model, messages=QUESTION
        )


# Asynchronous


async def ask(client: openai.AsyncOpenAI, at: Endpoint, messages: Any = QUESTION) -> str | None:
    reply = await client.chat.completions.create(model=at.model, messages=messages, **SHORT)
    return reply.choices[0].message.content


@case
async def several_at_once(at: Endpoint) -> object:
    async with async_client_of(at) as client:
        pictures = showing(at.picture)
        return await asyncio.gather(*(ask(client, at, each) for each in (QUESTION, pictures) * 2))


@case
async def an_asynchronous_stream(at: Endpoint) -> object:
    async with async_client_of(at) as client:
        stream = await client.chat.completions.create(
            model=at.model, messages=QUESTION, stream=True, **SHORT
        )
        return streamed([chunk async for chunk in stream])


@case
async def an_asynchronous_error(at: Endpoint) -> object:
    async with async_client_of(at) as client:
        return await ask(client, at, showing(BROKEN))


@case
async def a_task_that_is_cancelled(at: Endpoint) -> object:
    """And the same client is asked again."""
    async with async_client_of(at) as client:
        stream = await client.chat.completions.create(
            model=at.model,
            messages=QUESTION,
            stream=True,
            max_tokens=3000,
            extra_body={"ignore_eos": True},
        )
        first = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                first.set()

        cancelled = await cancel_once(first, asyncio.create_task(read()))
        return [cancelled, await ask(client, at)]


@case
async def streams_that_are_left(at: Endpoint) -> object:
    """Their context ends after the first word."""
    async with async_client_of(at) as client:
        for _ in range(2):
            stream = await client.chat.completions.create(
                model=at.model,
                messages=QUESTION,
                stream=True,
                max_tokens=3000,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                async for _ in stream:
                    break
        return await ask(client, at)


if __name__ == "__main__":
    main(case, {"openai": openai.__version__})
