"""What differs between the versions of vLLM that the tests run with (``make test VLLM=0.33``).

Tests may ask which version is here, so that each version is held to what it is. The product never
does: ``common/vllm_compat/features.py`` goes by what is there.
"""

from typing import Final, TypeVar

from packaging.version import Version

from common.vllm_compat.features import INSTALLED

_T = TypeVar("_T")

_SINCE_033: Final = Version(INSTALLED) >= Version("0.33")

CAME_WITH_033: Final = frozenset(
    {
        "/v1/decisions",
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
        "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES",
        "monokernel",
        "reasoning_effort_map",
        "sleep_mode_backend",
        "watchdog_config",
    }
)
"""Routes, arguments and variables that stand in our lists and that vLLM 0.32 has not."""

NOT_HERE: Final = frozenset[str]() if _SINCE_033 else CAME_WITH_033
"""Those that the vLLM here has not."""


def since_033(new: _T, old: _T) -> _T:
    """What is so from vLLM 0.33 on, or before."""
    return new if _SINCE_033 else old
