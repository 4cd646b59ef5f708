"""The data set for vLLM's own benchmark, read as that reads it."""

from pathlib import Path

import pytest

from tests.benchmarks.serving.answers import differing, told
from tests.benchmarks.serving.dataset import write_dataset
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.traffic import load


@pytest.mark.parametrize("name", ["pictures-2@1", "chats@1"])
def test_vllms_benchmark_reads_each_request(name: str, tmp_path: Path) -> None:
    from vllm.benchmarks.datasets.datasets import CustomImageDataset

    file = tmp_path / "load.jsonl"
    with file.open("w") as text:
        assert write_dataset(text, load(name).block(1, 0, "a", 8), Photos(28).uri) == 8
    read = CustomImageDataset(dataset_path=str(file), disable_shuffle=True)
    sampled = read.sample(tokenizer=None, num_requests=8, output_len=16)
    assert len(sampled) == 8
    for each in sampled:
        kinds = [part["type"] for part in each.prompt]
        assert kinds.count("image_url") == 1
        assert each.expected_output_len == 16


def test_answers_are_compared_with_those_of_the_first() -> None:
    texts = {"kv": ["a", "b"], "other": ["a", "c"], "same": ["a", "b"]}
    assert differing(texts) == {"kv": 0, "other": 1, "same": 0}
    assert told(differing(texts), 2) == ("answers: of 2, so many differ from those of kv: other 1")
    assert told({"kv": 0, "same": 0}, 2) == "answers: kv, same gave the same 2"
    assert told({"kv": 0}, 2) == "answers: kv was alone, so none were compared"
    assert told({}, 0) == "answers: none were compared"
