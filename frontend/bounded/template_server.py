"""Render chat templates that clients send, each in a process of its own: ``template_server FD``.

Jinja's sandbox does not limit time and memory: 22 bytes of arithmetic hold the GIL for minutes, and
no thread can be ended. This process imports once what rendering needs, forks for each order that
the frontend sends through the socket FD, and ends with it.
"""

import logging
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from frontend.bounded.forks import serve
from frontend.bounded.orders import (
    MAX_REASON,
    MAX_TEXT,
    OK,
    REFUSED,
    TEMPLATE_BOUNDS,
    Order,
)


class _Tokenizer:
    """Stand-in for the model's tokenizer, with only what rendering needs."""

    def __init__(self, tokens: dict[str, Any]) -> None:
        self._tokens = tokens

    def get_chat_template(self, template: str, tools: object = None) -> str:
        return template

    def apply_chat_template(
        self,
        conversation: list[Any],
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        prompts, _ = render_jinja_template(
            conversations=[conversation],
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(self._tokens | options),
        )
        return str(prompts[0])


def answer(order: Order) -> bytes:
    """Return the prompt, the format of contents or an error; the first byte tells which."""
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMError
    from vllm.renderers import hf

    try:
        if order.conversation is None:
            return OK + hf._detect_content_format(order.template, default="string").encode()
        tokenizer: Any = _Tokenizer(order.tokens)
        model: Any = None  # only looked at where there is no template
        prompt = hf.safe_apply_chat_template(
            model,
            tokenizer,
            order.conversation,
            chat_template=order.template,
            tokenize=False,
            **order.options,
        )
    except (TemplateError, MemoryError, RecursionError, TypeError, ValueError, VLLMError) as error:
        reason = f"the chat template of the request failed: {str(error) or 'it takes too much'}"
        return REFUSED + reason.encode(errors="replace")[:MAX_REASON]
    said = prompt.encode("utf-8", "surrogatepass")
    if len(said) > MAX_TEXT:
        return REFUSED + b"the chat template makes a prompt that is too long"
    return OK + said


def main(descriptor: int) -> None:
    """Render for the frontend until it is gone."""
    from transformers.utils import chat_template_utils  # noqa: F401  # children have it then
    from vllm.renderers import hf  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the frontend
    logging.disable()  # vLLM logs templates and their errors
    connection: Connection[bytes, Order] = Connection(descriptor)
    serve(connection, answer, TEMPLATE_BOUNDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
