"""Edges of histograms: vLLM's where it has the same figure, so that both can be drawn together.

``tests/unit/test_vllm_surface.py`` compares them with vLLM's.
"""

from typing import Final

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds to the first token."""

BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds from one token to the next."""

REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds of a whole request."""

STAGE_S: Final = (
    *(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    *(1.0, 3.0, 10.0, 30.0, 100.0),
)
"""Seconds of a stage; vLLM has no such figure, and some of ours take microseconds."""
