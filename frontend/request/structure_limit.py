"""How large the structure of an answer may be: a JSON schema, a grammar, choices.

vLLM reads it where other requests wait: in the one thread in which prompts become tokens here, and
on the event loop of a worker, which counts as lost when it is silent for long. One of half a
megabyte took 9 seconds in each.
"""

from typing import Final

import msgspec
from vllm.sampling_params import SamplingParams

from common.errors import RequestRejectedError

MOST_BYTES: Final = 128 << 10
"""OpenAI's own server takes 120,000 characters of names and values."""


def check_structure(params: object) -> None:
    """
    Args:
        params: of a request.

    Raises:
        RequestRejectedError: its structure is too large.
    """
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    if wanted is None:
        return
    said = [wanted.json, wanted.regex, wanted.choice, wanted.grammar, wanted.structural_tag]
    size = len(msgspec.json.encode([each for each in said if each], enc_hook=str))
    if size > MOST_BYTES:
        raise RequestRejectedError(
            f"the structure of the answer (a JSON schema, a grammar or choices) has {size} bytes, "
            f"more than {MOST_BYTES}"
        )
