"""The model of time of simulated engines, their totals and what they answer. No engine runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.cpu.common import (
    ECCPUConnectorMetadata,
    ECCPUWorkerMetadata,
)
from vllm.v1.outputs import ModelRunnerOutput

from tests.simgpu import host_memory
from tests.simgpu.answers import Vocabulary
from tests.simgpu.gpu import DeviceClock, GpuModel
from tests.simgpu.stats import FOLDER_VARIABLE, Stats, StatsFile
from tests.simgpu.totals import LateEnginesError, late_share, read_totals, refuse_late, since
from tests.simgpu.worker import Pooled, SimOutput


def test_the_parts_of_a_step_add_up() -> None:
    gpu = GpuModel(step_ms=8, prefill_ms=0.04, encoder_ms=0.06, context_ms=0.0001)
    assert gpu.step_seconds(0, 0, 0) == pytest.approx(0.008)
    assert gpu.step_seconds(1000, 200, 10_000) == pytest.approx(0.008 + 0.04 + 0.012 + 0.001)


def test_encodings_from_host_memory_take_time() -> None:
    gpu = GpuModel(step_ms=8, load_ms=0.01)
    assert gpu.step_seconds(0, 0, 0, 1000) == pytest.approx(0.018)


def test_a_step_says_which_encodings_it_copied() -> None:
    saved, loaded = {"a": [0, 1]}, {"b": (7, [2, 3], (2, 64)), "c": (8, [4], (1, 64))}
    made: Any = SimpleNamespace(ec_connector_metadata=ECCPUConnectorMetadata(saved, loaded))
    assert host_memory.loaded(made) == (2, 3)
    copied = host_memory.copied(made)
    assert copied is not None
    assert copied.ec_connector_worker_meta == ECCPUWorkerMetadata(["a"], [7, 8])
    for nothing in (ECCPUConnectorMetadata(), None):
        made.ec_connector_metadata = nothing
        assert host_memory.loaded(made) == (0, 0)
        assert host_memory.copied(made) is None


def test_speed_divides_all() -> None:
    slow, fast = GpuModel(speed=0.5), GpuModel(speed=2.0)
    assert slow.step_seconds(500, 50, 5) == pytest.approx(4 * fast.step_seconds(500, 50, 5))


def test_an_engine_gets_its_model_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuModel(step_ms=1.5, speed=0.25, kv_tokens=4096)
    for name, value in gpu.to_env().items():
        monkeypatch.setenv(name, value)
    assert GpuModel.from_env() == gpu
    monkeypatch.setenv("SIMGPU_SPEED", "")
    assert GpuModel.from_env().speed == GpuModel().speed


def test_steps_queue_up_on_the_device() -> None:
    clock = DeviceClock()
    first, _ = clock.submit(50.0)
    second, idle = clock.submit(25.0)
    assert second == pytest.approx(first + 25.0)
    assert idle == 0.0


def test_waiting_for_what_is_over_says_how_late_one_is() -> None:
    assert DeviceClock.wait_until(0.0) > 0.0


def test_totals_are_added_over_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    StatsFile(Stats(steps=3, busy_seconds=1.0, late_seconds=0.01)).write()
    own = next(tmp_path.glob("*.json"))
    (tmp_path / "1.json").write_text(json.dumps({"steps": 4, "busy_seconds": 3.0}))
    assert own.name != "1.json"
    totals = read_totals(tmp_path)
    assert (totals.steps, totals.busy_seconds) == (7, 4.0)
    assert since(Stats(steps=2), totals).steps == 5


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    StatsFile(Stats()).write()
    assert not list(tmp_path.iterdir())


def test_a_race_with_late_engines_is_refused() -> None:
    refuse_late(Stats(busy_seconds=100.0, late_seconds=5.0))
    refuse_late(Stats())
    late = Stats(busy_seconds=100.0, late_seconds=5.1)
    assert late_share(late) == pytest.approx(0.051)
    with pytest.raises(LateEnginesError, match=r"5\.1%"):
        refuse_late(late)


def test_tokens_depend_on_seed_and_position_and_are_ordinary() -> None:
    vocabulary = Vocabulary(100, special=[40, 41])
    tokens = [vocabulary.pick(b"seed", position) for position in range(200)]
    assert tokens == [vocabulary.pick(b"seed", position) for position in range(200)]
    assert tokens != [vocabulary.pick(b"other", position) for position in range(200)]
    assert set(tokens) <= set(range(25, 75)) - {40, 41}


def test_a_step_has_all_that_vllm_asks_of_one() -> None:
    """Also of the newer vLLM, which asks for more."""
    made = ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[1]])
    stats = Stats()
    assert SimOutput(made, 0.0, stats).get_output() is made
    assert stats.late_seconds > 0


def test_models_that_pool_give_numbers_once_the_prompt_is_computed() -> None:
    pooled = Pooled("embed", 8)
    assert pooled.of([]) is None
    one, other = pooled.of([1]), pooled.of([2])
    assert one is not None and other is not None
    assert one.shape == (8,)
    assert not one.equal(other)
    assert ((one >= 0) & (one < 1)).all()
