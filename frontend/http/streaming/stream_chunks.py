"""The events of streams, encoded with msgspec where vLLM's server does it with Pydantic.

vLLM makes three Pydantic models for each token, each with a validator in Python, and takes a third
of a frontend's time for that. What stands here takes their place where streams are made: the same
fields in the same order, of which only those are written that were set, so the bytes are the same.
What comes from elsewhere (tool calls, log probabilities, usage) stays vLLM's and is encoded by it.
"""

from types import ModuleType
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.completion import serving as completion_serving

from common.vllm_compat.features import give_translators, makers_of_messages

Model: TypeAlias = Any
"""What vLLM puts there: Pydantic's models, or nothing."""

Text: TypeAlias = str | UnsetType | None
Tokens: TypeAlias = list[int] | UnsetType | None


class Delta(msgspec.Struct, kw_only=True):
    """For a ``DeltaMessage``."""

    role: Text = UNSET
    content: Text = UNSET
    reasoning: Text = UNSET
    tool_calls: list[Model] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """For a ``ChatCompletionResponseStreamChoice``."""

    index: int
    delta: Model
    logprobs: Model = UNSET
    finish_reason: Text = UNSET
    stop_reason: int | Text = UNSET
    token_ids: Tokens = UNSET
    weight_versions: Model = UNSET  # from vLLM 0.33 on, as all of its name

    @property
    def tool_calls(self) -> Model:
        """Those of the message: vLLM takes what is no choice of its own for one."""
        return self.delta.tool_calls

    @tool_calls.setter
    def tool_calls(self, calls: list[Model]) -> None:
        self.delta.tool_calls = calls


class CompletionChoice(msgspec.Struct, kw_only=True):
    """For a ``CompletionResponseStreamChoice``."""

    index: int
    text: str
    logprobs: Model = UNSET
    finish_reason: Text = UNSET
    stop_reason: int | Text = UNSET
    prompt_token_ids: Tokens = UNSET
    token_ids: Tokens = UNSET
    weight_versions: Model = UNSET


class _Chunk(msgspec.Struct, kw_only=True):
    id: str | UnsetType = UNSET
    object: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    model: str
    choices: list[Model]
    usage: Model = UNSET
    system_fingerprint: Text = UNSET

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """As Pydantic's method of the same name."""
        if exclude_none or not exclude_unset:
            model: BaseModel = as_vllms(self)
            return model.model_dump_json(exclude_unset=exclude_unset, exclude_none=exclude_none)
        return _ENCODER.encode(self).decode()


class ChatChunk(_Chunk, kw_only=True):
    """For a ``ChatCompletionStreamResponse``."""

    prompt_token_ids: Tokens = UNSET
    prompt_text: Text = UNSET
    metrics: Model = UNSET
    kv_transfer_params: Model = UNSET  # likewise


class CompletionChunk(_Chunk, kw_only=True):
    """For a ``CompletionStreamResponse``."""

    metrics: Model = UNSET
    kv_transfer_params: Model = UNSET


STANDS_FOR: Final[dict[type[msgspec.Struct], type[BaseModel]]] = {
    Delta: DeltaMessage,
    ChatChoice: chat.ChatCompletionResponseStreamChoice,
    ChatChunk: chat.ChatCompletionStreamResponse,
    CompletionChoice: completion.CompletionResponseStreamChoice,
    CompletionChunk: completion.CompletionStreamResponse,
}
"""What each takes the place of."""

_MADE_IN: Final[dict[type[msgspec.Struct], ModuleType]] = {
    Delta: chat_serving,
    ChatChoice: chat_serving,
    ChatChunk: chat_serving,
    CompletionChoice: completion_serving,
    CompletionChunk: completion_serving,
}
_JUST_CONTENT: Final = {"content"}
_new: Final = object.__new__
_set: Final = object.__setattr__


def install() -> None:
    """Let all streams of this process be made so."""
    for ours, module in _MADE_IN.items():
        vars(module)[STANDS_FOR[ours].__name__] = ours
    # Parsers ask messages what they have and change them, so theirs stay vLLM's.
    for module in makers_of_messages():
        vars(module)[DeltaMessage.__name__] = quick_message
    give_translators(as_vllms)


def quick_message(content: Text = UNSET, **others: Model) -> DeltaMessage:
    """As the constructor makes it; just content, which nearly all have, without its validators."""
    if others or content is UNSET:
        return DeltaMessage(**(others if content is UNSET else {"content": content, **others}))
    message = _new(DeltaMessage)
    fields: dict[str, Model] = {
        "role": None,
        "content": content,
        "reasoning": None,
        "tool_calls": [],
    }
    _set(message, "__dict__", fields)
    _set(message, "__pydantic_fields_set__", {"content"})
    _set(message, "__pydantic_extra__", {})
    _set(message, "__pydantic_private__", None)
    return message


def as_vllms(value: Model) -> Model:
    """vLLM's own models, for what takes their place."""
    if isinstance(value, list):
        return [as_vllms(each) for each in value]
    if (model := STANDS_FOR.get(type(value))) is None:
        return value
    fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return model(**{name: as_vllms(field) for name, field in fields if field is not UNSET})


def _encode_model(model: Model) -> Model:
    if type(model) is DeltaMessage and model.model_fields_set == _JUST_CONTENT:
        return Delta(content=model.content)
    if isinstance(model, BaseModel):
        return msgspec.Raw(model.model_dump_json(exclude_unset=True).encode())
    raise TypeError(f"{type(model).__name__} is no part of an event")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_encode_model)
