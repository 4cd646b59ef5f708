"""Wrong inputs of ``/v1/responses``, found out aside.

pydantic says of each wrong item why it is none of some 200 kinds, and FastAPI and vLLM make
sentences of all that on the event loop: 45 KB of wrong items took half a minute. Eight tell enough.
"""

from typing import Any, Final

from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

PATH: Final = "/v1/responses"

FEW: Final = 8
"""Items that may be wrong together on the event loop."""


def is_long(body: object) -> bool:
    """Whether a body of such a request has more than a few items."""
    items = body.get("input") if isinstance(body, dict) else None
    return isinstance(items, list) and len(items) > FEW


def cut_behind_wrong(body: dict[str, Any]) -> dict[str, Any]:
    """The body, or if some item is wrong one that ends with the first of them and is refused for
    it. In a thread: it takes up to 50 µs an item.
    """
    items = body["input"]
    for end in range(FEW, len(items) + FEW, FEW):
        if _is_wrong(items[end - FEW : end]):
            cut = items[:end]
            # Unless it is wrong only without what stands before.
            return {**body, "input": cut} if _is_wrong(cut) else body
    return body


def _is_wrong(items: list[Any]) -> bool:
    try:
        ResponsesRequest.model_validate({"input": items})
    except ValidationError:
        return True
    return False
