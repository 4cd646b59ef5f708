"""Chat templates that clients send (``--trust-request-chat-template``), rendered in a process.

vLLM parses each on the event loop and renders it on the thread that all prompts need. Here
:mod:`frontend.bounded.template_server` does both, within limits on time and memory.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.inputs import DictPrompt
from vllm.renderers.params import ChatParams

from common.aio.processes import python_command
from common.errors import OverloadedError, RequestRejectedError
from common.lru import Lru
from common.vllm_compat.renderer_patches import replace_messages, replace_template
from frontend.asgi import as_vllm_error
from frontend.bounded.orders import OK, TEMPLATE_BOUNDS, Order
from frontend.bounded.work import BoundedWork

COMMAND: Final = python_command("frontend.bounded.template_server")

WAIT_S: Final = 10.0
"""Seconds that a request waits for earlier templates."""

STAND_INS: Final = {
    "openai": "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endfor %}",
    "string": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
"""Templates that vLLM parses instead of a client's, by the content format found in the latter."""

RENDERED: Final = "mmrouter_prompt"
_AS_RENDERED: Final = f"{{{{ {RENDERED} }}}}"

_FORMATS_KEPT: Final = 128

_OWN: Final = "mmrouter_template"


@dataclass(frozen=True)
class _Own:
    """A client's template on its way through vLLM's renderer. JSON can't produce this type."""

    template: str


class ClientTemplates:
    """Renders chats that bring a template. For one renderer and one event loop."""

    def __init__(self, renderer: HfRenderer, default: str | None) -> None:
        """``default`` is the template of other chats, if it is not the model's."""
        self._renderer = renderer
        self._default = default
        self._work = BoundedWork(COMMAND, "chat templates", WAIT_S, TEMPLATE_BOUNDS)
        self._formats: Lru[str, str] = Lru(_FORMATS_KEPT)
        self._render_now = renderer.render_messages
        self._render_later = renderer.render_messages_async
        self._apply = renderer._apply_chat_template_async

    def take_over(self) -> None:
        """Keep clients' templates from being parsed or rendered in this process."""
        replace_messages(self._renderer, self.render_now, self.render)
        replace_template(self._renderer, self._apply_template)
        self._work.start_soon()

    def close(self) -> None:
        self._work.close()

    def render_now(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], DictPrompt]:
        """Render a chat without a template of its own. Raises VLLMValidationError if it has one,
        since a synchronous caller can't wait for the process.
        """
        if self._template_of(params) is not None:
            raise VLLMValidationError("a chat template is not taken here: leave it out")
        return self._render_now(messages, params)

    async def render(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], DictPrompt]:
        """Render a chat with its template. Raises VLLMError if that fails or takes too long."""
        template = self._template_of(params)
        if template is None:
            return await self._render_later(messages, params)
        options = {k: v for k, v in params.chat_template_kwargs.items() if k != "chat_template"}
        options[_OWN] = _Own(template)
        stand_in = STAND_INS[await self._format(template)]
        return await self._render_later(
            messages, replace(params, chat_template=stand_in, chat_template_kwargs=options)
        )

    def _template_of(self, params: ChatParams) -> str | None:
        template = params.get_apply_chat_template_kwargs().get("chat_template")
        text = None if template is None else str(template)  # clients may send any JSON
        named = getattr(self._renderer.get_tokenizer(), "chat_template", None)
        if text in (None, self._default) or (isinstance(named, dict) and text in named):
            return None
        return text

    async def _format(self, template: str) -> str:
        found = self._formats.get(template)
        if found is None:
            found = await self._ask(Order(template, None, {}, {}))
            self._formats.put(template, found)
        return found

    async def _apply_template(
        self, model_config: Any, tokenizer: Any, conversation: list[Any], /, **options: Any
    ) -> Any:
        """Replace the renderer's method, which still tokenizes the prompt on request."""
        own = options.get(_OWN)
        if not isinstance(own, _Own):
            return await self._apply(model_config, tokenizer, conversation, **options)
        del options[_OWN]
        of_tokenizer = {k: options.pop(k) for k in ("tokenize", "return_dict") if k in options}
        options.pop("chat_template")
        order = Order(own.template, conversation, options, tokenizer.special_tokens_map)
        prompt = {"chat_template": _AS_RENDERED, RENDERED: await self._ask(order)}
        return await self._apply(model_config, tokenizer, conversation, **of_tokenizer, **prompt)

    async def _ask(self, order: Order) -> str:
        try:
            said = await self._work.ask(order)
        except OverloadedError as busy:
            raise as_vllm_error(busy) from busy
        if not said:
            costly = RequestRejectedError(
                f"the chat template of the request takes more than {TEMPLATE_BOUNDS.cpu_s} s or "
                f"{TEMPLATE_BOUNDS.memory_bytes >> 20} MiB to render"
            )
            raise as_vllm_error(costly) from costly
        text = said[1:].decode("utf-8", "surrogatepass")
        if said[:1] != OK:
            raise VLLMValidationError(text, parameter="chat_template")
        return text


def take_templates(renderer: BaseRenderer, default: str | None) -> ClientTemplates | None:
    """Take over the chats of a renderer; return None if it uses no templates."""
    if not isinstance(renderer, HfRenderer):
        return None
    templates = ClientTemplates(renderer, default)
    templates.take_over()
    return templates
