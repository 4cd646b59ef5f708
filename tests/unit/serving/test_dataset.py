"""The data set for vLLM's own benchmark, and answers that are compared."""

import io
import json

import pytest

from tests.benchmarks.serving.answers import differing, told
from tests.benchmarks.serving.dataset import write_dataset
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.traffic import load


@pytest.mark.parametrize("name", ["pictures-2@1", "chats@1"])
def test_a_line_has_what_vllms_benchmark_wants(name: str) -> None:
    file = io.StringIO()
    assert write_dataset(file, load(name).block(1, 0, "a", 8), Photos(28).uri) == 8
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert len(lines) == 8
    for line in lines:
        kinds = [part["type"] for part in line["content"]]
        assert kinds.count("image_url") == 1
        for part in line["content"]:
            if part["type"] == "text":
                assert part["text"]
            else:
                assert part["image_url"]["url"].startswith("data:image/jpeg;base64,")


def test_answers_are_compared_with_those_of_the_first() -> None:
    texts = {"kv": ["a", "b"], "other": ["a", "c"], "same": ["a", "b"]}
    assert differing(texts) == {"kv": 0, "other": 1, "same": 0}
    assert told(differing(texts), 2) == ("answers: of 2, so many differ from those of kv: other 1")
    assert told({"kv": 0, "same": 0}, 2) == "answers: kv, same gave the same 2"
    assert told({"kv": 0}, 2) == "answers: kv was alone, so none were compared"
    assert told({}, 0) == "answers: none were compared"
