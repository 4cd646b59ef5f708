"""What servers count by themselves, as the serving benchmark reads it."""

from tests.benchmarks.serving.contenders import Family
from tests.benchmarks.serving.counters import Counters, read

OURS = """
# TYPE mmrouter_predicted_cached_tokens counter
mmrouter_predicted_cached_tokens_total{worker_id="a"} 10.0
mmrouter_predicted_cached_tokens_total{worker_id="b"} 5.0
# TYPE mmrouter_hf_processor_runs gauge
mmrouter_hf_processor_runs{side="frontend",worker_id=""} 3.0
mmrouter_hf_processor_runs{side="worker",worker_id="a"} 1.0
# TYPE mmrouter_tensor_bytes_sent counter
mmrouter_tensor_bytes_sent_total{transport="shm",worker_id="a"} 4096.0
"""
VLLM = """
# TYPE vllm:mm_cache_queries counter
vllm:mm_cache_queries_total{engine="0"} 8.0
# TYPE vllm:mm_cache_hits counter
vllm:mm_cache_hits_total{engine="0"} 6.0
"""


def test_ours_are_summed_over_workers() -> None:
    assert read(Family.OURS, [OURS]) == Counters(15.0, 4.0, 4096.0)


def test_what_vllms_cache_did_not_have_was_processed_on_every_server() -> None:
    assert read(Family.VLLM_ROUTER, [VLLM, VLLM]) == Counters(None, 4.0, None)


def test_what_is_not_said_before_or_after_was_not_measured() -> None:
    before, now = Counters(1.0, 2.0, None), Counters(5.0, 2.0, 7.0)
    assert now.since(before) == Counters(4.0, 0.0, None)
