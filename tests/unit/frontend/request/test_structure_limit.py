"""Structures of answers that would keep others waiting."""

import sys
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from common.errors import RequestRejectedError
from frontend.request.answer_limits import MAX_BYTES, check_structure

LONG = "x" * MAX_BYTES


def asked(**wanted: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "examples": [LONG]}},
        {"json": LONG},
        {"regex": LONG},
        {"grammar": LONG},
        {"choice": ["x"] * MAX_BYTES},
        {"structural_tag": LONG},
    ],
)
def test_large_ones_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestRejectedError, match=r"the structure of the answer .* more than"):
        check_structure(asked(**wanted))


def test_what_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"items": schema}
    with pytest.raises(RequestRejectedError, match="nested too deeply"):
        check_structure(asked(json=schema))


def test_half_of_a_surrogate_pair_counts_too() -> None:
    check_structure(asked(json={"const": "\ud800"}))
    with pytest.raises(RequestRejectedError, match="more than"):
        check_structure(asked(json={"const": "\ud800", "examples": [LONG]}))


def test_others_pass() -> None:
    for params in (
        asked(json={"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}),
        asked(regex="a|b"),
        asked(choice=["yes", "no"] * 1000),
        asked(json_object=True),
        SamplingParams(),
        PoolingParams(),
        None,
    ):
        check_structure(params)
