"""The one line that a run on a GPU ends with."""

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.gpu.line import PICTURE, Line, line
from tests.gpu.results import Answers, Copies, Cost, FirstToken, Fleet, Kernels, Reads, Result

README = Path(__file__).parents[2] / "gpu" / "README.md"

KERNELS = Kernels("NVIDIA H100", {"driver": "580"}, {"rms_norm": 0.001}, [])
COPIES = Copies({PICTURE: {"pageable": 5.0, "pinned": None}}, {}, [])
READS = Reads({f"host_to_gpu_{PICTURE}": 9.0}, {})


def answers(questions: int, same: int | None = None, exact: int | None = None) -> Answers:
    return Answers(
        questions,
        questions if same is None else same,
        questions if exact is None else exact,
        0,
        [],
    )


def fleet(asked: Answers | None = None, **times: float) -> Fleet:
    cost = Cost(20, 10, 300)
    first = {name: FirstToken(ms, ms / 2, 4, {name: 4}, cost) for name, ms in times.items()}
    return Fleet("float32", 1.0, asked, first, None, [], {})


def made(results: dict[str, Result], missing: dict[str, str] | None = None) -> Line:
    return line("cuda", results, missing or {}, {"mmrouter": "abc"}, 12.0)


def test_it_has_the_figures_of_all_parts() -> None:
    found = made(
        {
            "kernels": KERNELS,
            "bfloat16": fleet(answers(36, 35), plain=20, shm=22, nixl=24, inline=30),
            "h2d": COPIES,
            "nixl": READS,
            "float32": fleet(answers(36)),
        }
    )
    assert found.faults == [], "other tokens are no fault in bfloat16"
    said: dict[str, Any] = json.loads(msgspec.json.encode(found))
    assert said == {
        "device": "cuda",
        "card": "NVIDIA H100",
        "versions": {"mmrouter": "abc", "driver": "580"},
        "questions": 36,
        "same_tokens": 36,
        "predicted_is_realised": 36,
        "questions_bfloat16": 36,
        "same_tokens_bfloat16": 35,
        "predicted_is_realised_bfloat16": 36,
        "first_token_new_ms": 22,
        "first_token_repeated_ms": 11,
        "plain_first_token_new_ms": 20,
        "plain_first_token_repeated_ms": 10,
        "shm_ms": 22,
        "nixl_ms": 24,
        "inline_ms": 30,
        "new_cost": {
            name: {"user_ms": 20, "system_ms": 10, "faults": 300}
            for name in ("plain", "shm", "nixl", "inline")
        },
        "h2d_gb_s": {"pageable": 5, "pinned": None},
        "nixl_gb_s": {f"host_to_gpu_{PICTURE}": 9},
        "not_engines_with_cuda": [],
        "missing": {},
        "seconds": 12,
    }


def test_the_readme_has_a_row_for_each_field() -> None:
    page = README.read_text()
    assert [name for name in Line.__struct_fields__ if f"`{name}`" not in page] == []


def test_what_was_not_measured_is_null_and_has_a_reason() -> None:
    found = made({"float32": fleet(answers(4))}, {"h2d": "3 s were left, it needs 20"})
    assert (found.card, found.h2d_gb_s, found.first_token_new_ms) == (None, None, None)
    assert found.faults == ["h2d: 3 s were left, it needs 20"]


def test_a_step_that_failed_is_missing() -> None:
    broken = Fleet("float32", 1.0, answers(4), {}, None, [], {"first_tokens": "it broke"})
    reads = Reads({}, {"host_to_gpu": "no CUDA in UCX"})
    found = made({"float32": broken, "nixl": reads})
    assert found.missing == {
        "float32 first_tokens": "it broke",
        "nixl host_to_gpu": "no CUDA in UCX",
    }


def test_wrong_answers_and_predictions_are_faults() -> None:
    assert made({"float32": fleet(answers(4, same=3))}).faults == [
        "3 of 4 answers are plain vLLM's"
    ]
    assert made({"float32": fleet(answers(4, exact=2))}).faults == ["2 of 4 predictions are exact"]
    assert made({"bfloat16": fleet(answers(4, exact=2))}).faults == [
        "2 of 4 predictions are exact in bfloat16"
    ]


def test_processes_that_opened_cuda_are_named_once() -> None:
    opened = Fleet("float32", 1.0, None, {}, None, ["worker-0: python"], {})
    found = made({"bfloat16": opened, "float32": opened})
    assert found.not_engines_with_cuda == ["worker-0: python"]


def test_times_of_graphs_count_only_without_others() -> None:
    eager, graphs = fleet(shm=22, plain=20), fleet(shm=12, plain=10)
    assert made({"bfloat16": eager, "graphs": graphs}).shm_ms == 22
    assert made({"graphs": graphs}).shm_ms == 12
