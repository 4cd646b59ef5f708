"""A seed ends no engine on a CPU that reads a prompt in pieces."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

from backend_worker.engine.vllm_faults import cpu_seeds


def drawn(generator: torch.Generator) -> float:
    return float(torch.empty(1).exponential_(generator=generator))


def test_a_piece_takes_back_what_it_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: list[object] = []
    monkeypatch.setattr(cpu_seeds, "_add_request", lambda _, request: batch.append(request))
    assert InputBatch.add_request is cpu_seeds.add_request
    given = torch.Generator().manual_seed(7)
    first, second = drawn(given), drawn(given)
    request = SimpleNamespace(generator=given.manual_seed(7))
    cpu_seeds.add_request(None, request)
    for _ in range(3):
        assert drawn(request.generator) == first
        request.generator.set_offset(request.generator.get_offset() - 4)  # as vLLM does
    assert drawn(request.generator) == first
    cpu_seeds.add_request(None, request)  # after it was preempted
    assert drawn(request.generator) == second
    request.generator.set_offset(request.generator.get_offset() - 4)
    assert drawn(request.generator) == second
    cpu_seeds.add_request(None, SimpleNamespace(generator=None))
    assert len(batch) == 3
