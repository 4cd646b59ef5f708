"""LangChain's OpenAI chat model: calls, streams, batches, pictures, tools, structured outputs."""

import asyncio
from importlib.metadata import version
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()

QUESTION = "Tell me about the river."


class Paint(BaseModel):
    """Paint."""

    colour: Literal["red", "blue"]


def model_of(at: Endpoint, **options: Any) -> ChatOpenAI:
    given = {"model": at.model, "max_completion_tokens": 6, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=f"{at.url}/v1", api_key=SecretStr(at.key), **given | options)


def showing(url: str) -> HumanMessage:
    return HumanMessage(
        content=[
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    )


def whole(message: Any) -> object:
    """What users see of a message."""
    usage = message.usage_metadata
    return {
        "text": message.text,
        "calls": [(call["name"], call["args"]) for call in message.tool_calls],
        "tokens": usage and [usage["input_tokens"], usage["output_tokens"]],
        "finish": message.response_metadata.get("finish_reason"),
        "model": message.response_metadata.get("model_name"),
    }


@case
def a_call(at: Endpoint) -> object:
    return whole(model_of(at).invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)]))


@case
def a_picture(at: Endpoint) -> object:
    return whole(model_of(at).invoke([showing(at.picture)]))


@case
def a_picture_in_langchains_words(at: Endpoint) -> object:
    data = at.picture.partition(",")[2]
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    return whole(model_of(at).invoke([HumanMessage(content=["What is this?", block])]))


@case
def a_stream(at: Endpoint) -> object:
    chunks = list(model_of(at, stream_usage=True).stream(QUESTION))
    whole_message = chunks[0]
    for chunk in chunks[1:]:
        whole_message += chunk
    return whole(whole_message)


@case
def a_batch(at: Endpoint) -> object:
    return [whole(each) for each in model_of(at).batch([QUESTION, [showing(at.picture)]])]


@case
async def asynchronously(at: Endpoint) -> object:
    model = model_of(at)
    pieces = [chunk.text async for chunk in model.astream(QUESTION)]
    answers = await asyncio.gather(*(model.ainvoke(QUESTION) for _ in range(3)))
    return ["".join(pieces), [answer.text for answer in answers]]


@case
def log_probabilities(at: Endpoint) -> object:
    message = model_of(at, logprobs=True, top_logprobs=2).invoke(QUESTION)
    return [each["token"] for each in message.response_metadata["logprobs"]["content"]]


@case
def a_structured_answer(at: Endpoint) -> object:
    model = model_of(at, max_completion_tokens=60).with_structured_output(
        Paint, method="json_schema"
    )
    answer = model.invoke(QUESTION)
    return isinstance(answer, Paint) and answer.colour


@case
def a_structured_answer_by_a_tool(at: Endpoint) -> object:
    model = model_of(at, max_completion_tokens=200).with_structured_output(
        Paint, method="function_calling", include_raw=True
    )
    answer = model.invoke(QUESTION)
    return isinstance(answer, dict) and whole(answer["raw"])


@case
def a_tool(at: Endpoint) -> object:
    model = model_of(at, max_completion_tokens=60).bind_tools([Paint], tool_choice="any")
    return whole(model.invoke(QUESTION))


@case
def what_a_tool_said(at: Endpoint) -> object:
    call = {"name": "Paint", "args": {"colour": "red"}, "id": "c1"}
    said = [AIMessage("", tool_calls=[call]), ToolMessage("done", tool_call_id="c1")]
    return whole(model_of(at).bind_tools([Paint]).invoke([HumanMessage(QUESTION), *said]))


@case
def responses(at: Endpoint) -> object:
    return model_of(at, use_responses_api=True).invoke([showing(at.picture)]).text


@case
def a_stream_of_responses(at: Endpoint) -> object:
    return "".join(chunk.text for chunk in model_of(at, use_responses_api=True).stream(QUESTION))


@case
def an_unknown_model(at: Endpoint) -> object:
    return whole(model_of(at, model="nobody").invoke(QUESTION))


@case
def a_question_that_is_too_long(at: Endpoint) -> object:
    return whole(model_of(at).invoke("river " * 5000))


@case
def a_broken_picture(at: Endpoint) -> object:
    return whole(model_of(at).invoke([showing("data:image/png;base64,bm9uZQ==")]))


@case
def a_broken_picture_in_a_stream(at: Endpoint) -> object:
    return list(model_of(at).stream([showing("data:image/png;base64,bm9uZQ==")]))


if __name__ == "__main__":
    main(case, {name: version(name) for name in ("langchain-openai", "langchain-core", "openai")})
