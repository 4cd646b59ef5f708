"""llama-index, as its users set it for servers that are like OpenAI's."""

from importlib.metadata import version
from typing import Literal

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()


class Paint(BaseModel):
    """Paint."""

    colour: Literal["red", "blue"]


def model(at: Endpoint, tokens: int = 8) -> OpenAILike:
    return OpenAILike(
        model=at.model,
        api_base=f"{at.url}/v1",
        api_key=at.key,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=tokens,
        max_retries=0,
    )


@case
def text(at: Endpoint) -> object:
    return model(at).chat([ChatMessage(content="Hello")]).message.content


@case
def completion(at: Endpoint) -> object:
    return model(at).complete("Hello").text


@case
def stream(at: Endpoint) -> object:
    return [each.delta for each in model(at).stream_chat([ChatMessage(content="Hello")])]


@case
def picture(at: Endpoint) -> object:
    blocks = [TextBlock(text="What?"), ImageBlock(url=at.picture)]
    return model(at).chat([ChatMessage(blocks=blocks)]).message.content


@case
def structured(at: Endpoint) -> object:
    chat = model(at, 64).as_structured_llm(Paint)
    return chat.complete("A colour").raw.model_dump()


if __name__ == "__main__":
    main(case, {"llama-index-llms-openai-like": version("llama-index-llms-openai-like")})
