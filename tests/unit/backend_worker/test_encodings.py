"""Encodings in the host's memory. No engine runs."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.common import (
    ECCPUConnectorMetadata,
    ECCPUWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.outputs import ECConnectorOutput

from backend_worker.engine.encodings import HostEncodings, kept_tokens, refuses
from backend_worker.engine.ipc_names import SHARED_MEMORY, instance_name
from common.errors import ConfigurationError
from common.request_plane.operations import (
    Operation,
    ReleaseKvCacheMemory,
    ReloadWeights,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
)
from tests.unit.backend_worker.configured import ours

TOKEN = 128 * 4
"""Bytes of a media token's encoding of the demo model in float32."""

ROOM = 1000


def in_host_memory(size: object) -> str:
    config = {
        "ec_connector": "ECCPUConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"ec_cpu_bytes": size},
    }
    return f"--ec-transfer-config={json.dumps(config)}"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ((), 2048),
        ((in_host_memory(100_000 * TOKEN),), 100_000),
        ((in_host_memory(100 * TOKEN),), 2048),
    ],
)
def test_what_is_kept(model: Path, flags: tuple[str, ...], tokens: int) -> None:
    sizes = ["--dtype=float32", "--max-num-batched-tokens=2048"]
    assert kept_tokens(ours([f"--model={model}", *sizes, *flags])) == tokens


@pytest.mark.parametrize("size", [0, TOKEN - 1, "16GiB", None, -1, 0.5])
def test_what_is_no_room_is_said(model: Path, size: object) -> None:
    with pytest.raises(ConfigurationError, match=f"ec_cpu_bytes is {size!r}, .* takes {TOKEN} or"):
        ours([f"--model={model}", "--dtype=float32", in_host_memory(size)])


def test_more_than_there_is_is_said(model: Path) -> None:
    free = shutil.disk_usage(SHARED_MEMORY).free
    flags = [f"--model={model}", "--dtype=float32", "--data-parallel-size=2"]
    with pytest.raises(ConfigurationError, match=r"/dev/shm has .* left, and 2 times ec_cpu_bytes"):
        ours([*flags, in_host_memory(free // 2 + (1 << 30))])


@pytest.mark.parametrize(
    ("operation", "survived"),
    [
        (ReloadWeights(), True),
        (ResetEncoderCache(), True),
        (Sleep(2, "wait"), True),
        (Sleep(1, "wait"), False),
        (ResetMmCache(), False),
        (ResetPrefixCache(), False),
        (ReleaseKvCacheMemory(), False),
    ],
)
def test_other_weights_are_refused(operation: Operation, survived: bool) -> None:
    """Encodings of a connector would survive them."""
    kept: Any = SimpleNamespace(ec_transfer_config=object())
    assert bool(refuses(kept, operation)) == survived
    nothing: Any = SimpleNamespace(ec_transfer_config=None)
    assert refuses(nothing, operation) == ""


Making = Callable[..., HostEncodings]


@pytest.fixture
def making(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    """Makes the scheduler's half, as vLLM does, of an engine that measured some widths."""
    with ExitStack() as stack:

        def make(**widths: int) -> HostEncodings:
            flags = [f"--model={model}", "--dtype=float32", in_host_memory(ROOM * TOKEN)]
            config = ours(flags)
            assert config.ec_transfer_config is not None
            config.ec_transfer_config.mm_encoder_output_widths = widths
            # It wants that of a device.
            monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda _: True))
            made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
            stack.callback(made.shutdown)
            assert isinstance(made, HostEncodings)
            return made

        yield make


def comes(
    connector: HostEncodings, name: str, modality: str, tokens: int
) -> ECCPUConnectorMetadata:
    """A medium is put into the encoder cache."""
    position = PlaceholderRange(offset=0, length=tokens)
    feature = SimpleNamespace(identifier=name, modality=modality, mm_position=position)
    request: Any = SimpleNamespace(mm_features=[feature], request_id="r")
    connector.update_state_after_alloc(request, 0)
    nothing: Any = None
    return connector.build_connector_meta(nothing)


def test_what_was_encoded_is_copied_back(making: Making) -> None:
    connector = making(image=128)
    assert len(comes(connector, "a", "image", ROOM).saves["a"]) == ROOM
    assert not connector.has_cache_item("a")  # not there yet
    saved = ECConnectorOutput(ec_connector_worker_meta=ECCPUWorkerMetadata(["a"], []))
    connector.update_connector_output(saved)
    assert connector.has_cache_item("a")
    loads = comes(connector, "a", "image", ROOM).loads
    assert loads["a"][2] == (ROOM, 128)


@pytest.mark.parametrize(
    ("modality", "tokens"), [("image", ROOM + 1), ("video", ROOM // 3 + 1), ("audio", 1)]
)
def test_what_has_no_room_is_not_kept(making: Making, modality: str, tokens: int) -> None:
    """vLLM's own ends its engine. Videos are encoded three times as wide as the model's embeddings
    here, and of audio there are only a client's embeddings.
    """
    connector = making(image=128, video=384)
    made = comes(connector, "large", modality, tokens)
    assert made.saves == {} and made.loads == {}
    assert not connector.has_cache_item("large")
    assert comes(connector, "small", "video", ROOM // 3).saves.keys() == {"small"}


def test_its_memory_has_the_workers_name(making: Making) -> None:
    file = SHARED_MEMORY / f"vllm_ec_{instance_name(os.getpid())}_dp0.mmap"
    connector = making(image=128)
    assert file.exists()
    connector.shutdown()
    assert not file.exists()
