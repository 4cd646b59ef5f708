"""What a client says of other servers is nobody's business."""

from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from common.request_plane.protocol import drop_transfer_params, names_encoder

ODD: list[Any] = [{"do_remote_prefill": True, "remote_prefill_cached_tokens": -1}, "x", 7, [], None]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_it_is_dropped_whatever_it_is(name: str, value: Any) -> None:
    params = SamplingParams(extra_args={name: value, "mine": 1})
    drop_transfer_params(params)
    assert params.extra_args == {"mine": 1}
    alone = SamplingParams(extra_args={name: value})
    drop_transfer_params(alone)
    assert alone.extra_args is None  # as of a request that never had any


def test_others_stay_as_they_are() -> None:
    for params in (SamplingParams(), SamplingParams(extra_args={"mine": {}}), PoolingParams()):
        before = repr(params)
        drop_transfer_params(params)
        assert repr(params) == before
    drop_transfer_params(None)


def test_who_names_an_encoder() -> None:
    assert names_encoder(SamplingParams(extra_args={"ec_transfer_params": {"a": {}}}))
    others: list[Any] = [None, {}, {"ec_transfer_params": {}}, {"kv_transfer_params": {"a": 1}}]
    for extra in others:
        assert not names_encoder(SamplingParams(extra_args=extra))
    assert not names_encoder(PoolingParams())
