"""How large the structure of an answer may be: a JSON schema, a grammar, choices.

vLLM reads it where other requests wait: in the one thread in which prompts become tokens here, and
on the event loop of a worker, which counts as lost when it is silent for long. Of a list in a list
and so on, 58 deep, 480 KiB took 6 seconds of a core there, and 120 KiB 1.4.
"""

import json
from typing import Any, Final

import msgspec
from vllm.sampling_params import SamplingParams

from common.errors import RequestRejectedError

MOST_BYTES: Final = 128 << 10
"""Of JSON."""


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
    size = _bytes([each for each in said if each])
    if size > MOST_BYTES:
        raise RequestRejectedError(
            f"the structure of the answer (a JSON schema, a grammar or choices) has {size} bytes, "
            f"more than {MOST_BYTES}"
        )


def _bytes(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value, enc_hook=str))
    except UnicodeEncodeError:  # half of a surrogate pair, of which vLLM says what is wrong with it
        return len(json.dumps(value, default=str))
    except RecursionError as error:
        raise RequestRejectedError("the structure of the answer is nested too deeply") from error
