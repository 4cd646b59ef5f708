"""A worker's engine is configured as that of ``vllm serve``, which is asked here itself: each
field of both configurations is compared. No engine."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
from transformers import PretrainedConfig
from vllm import AsyncEngineArgs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.api_server import entry
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backend_worker.engine.config import prepare_environment
from common.errors import ConfigurationError
from common.vllm_compat.engine_arguments import check_arguments
from common.vllm_compat.features import server_arguments
from tests.unit.backend_worker.configured import ours

ON_PURPOSE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cache_config.prefix_caching_hash_algo": "frontends make the same hashes, which they could "
        "not of Python's pickles; what the user gives stays",
        "kv_events_config": "they tell frontends what is cached; what the user gives stays",
        "model_config.multimodal_config.enable_mm_embeds": "what the user gives: vLLM lets clients "
        "send embeddings wherever there is a connector, and they can end an engine",
        "model_config.multimodal_config.allow_missing_mm_embeddings": "as above",
        "ec_transfer_config.ec_connector": "one of ours, whose memory is found and removed if the "
        "engine is killed, and which does not end the engine when a medium has no room",
        "ec_transfer_config.ec_connector_module_path": "as above",
        "ec_transfer_config.ec_connector_extra_config": "as above",
        "profiler_config.ignore_frontend": "vLLM starts and stops this process's profiler in any "
        "threads: PyTorch's second one kills it",
        "scheduler_config.encoder_cache_size": "with --encoder-cache-tokens, for which vLLM has "
        "no flag",
        "structured_outputs_config": "the same settings, of a class of ours: an engine process "
        "that unpickles them watches how long structures take",
        "speculative_config.disable_lookahead_block_hashes": "frontends hash a prompt's blocks by "
        "themselves, without what comes after",
        "parallel_config._api_process_count": "a worker is one process; with several ranks "
        "`vllm serve` starts a server for each",
        "parallel_config._api_process_rank": "as above",
    }
)
"""Fields of vLLM's configuration that are others in a worker than in ``vllm serve``: the reason."""

DRAWN = {
    "ec_transfer_config.engine_id",
    "instance_id",
    "kv_transfer_config.engine_id",
    "parallel_config._data_parallel_master_port_list",
    "parallel_config.data_parallel_master_port",
}
"""Random names and free ports, which each process draws for itself."""

ALWAYS = {
    "cache_config.prefix_caching_hash_algo",
    "kv_events_config",
    "profiler_config.ignore_frontend",
    "structured_outputs_config",
}
"""What is another in every worker; the rest of ``ON_PURPOSE`` with several ranks, or drafting."""

DRAFTING = {"speculative_config.disable_lookahead_block_hashes"}
"""With what hashes tokens ahead; ``tests/unit/common/test_vllm_features.py`` has that."""

OF_CLIENTS = {
    "model_config.multimodal_config.enable_mm_embeds",
    "model_config.multimodal_config.allow_missing_mm_embeddings",
}
"""With a connector."""

OUR_CONNECTOR = {
    "ec_transfer_config.ec_connector",
    "ec_transfer_config.ec_connector_module_path",
    "ec_transfer_config.ec_connector_extra_config",
}
"""With encodings in the host's memory."""

EC_CONNECTOR = (
    '--ec-transfer-config={"ec_connector": "ECCPUConnector", "ec_role": "ec_both", '
    '"ec_connector_extra_config": {"ec_cpu_bytes": 1000000}}'
)

KV_CONNECTOR = (
    '--kv-transfer-config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"cpu_bytes_to_use": 1000000}}'
)


class Made(Exception):
    """vLLM has made its configuration, and need not start."""


def theirs(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """That of vLLM's command, which gets as far as its configuration."""
    made: list[VllmConfig] = []
    create = AsyncEngineArgs.create_engine_config

    def stop(args: AsyncEngineArgs, *given: object, **named: object) -> VllmConfig:
        made.append(create(args, *given, **named))
        raise Made

    with monkeypatch.context() as patched:
        patched.setattr(AsyncEngineArgs, "create_engine_config", stop)
        for module in (serve, entry):
            patched.setattr(module, "setup_server", lambda *_, **__: ("", None))
            patched.setattr(module.signal, "signal", lambda *_: None)
        # Where there are several API servers it changes the environment, for all that comes after.
        patched.setattr(serve, "setup_multiprocess_prometheus", lambda: None)
        args = server_arguments().make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        with pytest.raises(Made):
            serve.ServeSubcommand.cmd(args)
    return made[0]


def differences(one: object, other: object, where: str = "") -> Iterator[str]:
    """Paths of the fields that differ; those of fields with fields are followed."""
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        for name in vars(one).keys() | vars(other).keys():
            path = f"{where}.{name}" if where else name
            yield from differences(vars(one).get(name), vars(other).get(name), path)
    elif isinstance(one, PretrainedConfig) and type(one) is type(other):
        if one.to_dict() != other.to_dict():  # type: ignore[attr-defined]
            yield where
    elif one != other:
        yield where


@pytest.fixture
def big_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses its sizes as on an H100; all else is as on this machine."""
    platform = type(current_platform)
    choose = AsyncEngineArgs.get_batch_defaults

    def as_on_a_gpu(world_size: int) -> object:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(platform, "is_cpu", lambda self: False)
            patched.setattr(platform, "get_device_total_memory", lambda self, device_id=0: 80 << 30)
            patched.setattr(platform, "get_device_name", lambda self, device_id=0: "NVIDIA H100")
            return choose(world_size)

    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", staticmethod(as_on_a_gpu))


FLAGS: list[list[str]] = [
    [],
    ["--max-model-len=512", "--no-enable-chunked-prefill"],
    ["--performance-mode=throughput"],
    ["--runner=pooling", "--convert=embed"],
    ['--speculative-config={"method": "ngram", "num_speculative_tokens": 2}'],
    ["--reasoning-parser=qwen3"],
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "no flags")
def test_an_engine_is_configured_as_that_of_vllms_server(
    model: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--model={model}", *flags]
    found = set(differences(ours(flags), theirs(flags, monkeypatch)))
    assert found - DRAWN == ALWAYS


@pytest.mark.usefixtures("big_gpu")
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "no flags")
def test_it_is_on_a_big_gpu_too(
    model: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--model={model}", *flags]
    assert set(differences(ours(flags), theirs(flags, monkeypatch))) - DRAWN == ALWAYS


@pytest.mark.usefixtures("big_gpu")
def test_its_steps_are_as_large_there(model: Path) -> None:
    sizes = ours([f"--model={model}"]).scheduler_config
    assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (8192, 1024)


def test_it_says_on_what_it_runs(model: Path) -> None:
    """By which `prompt_logprobs` beside adapters are refused (``engine_calls.py``)."""
    config = ours([f"--model={model}", "--enable-lora"])
    assert config.device_config.device_type == "cpu"
    assert config.lora_config is not None


def test_what_is_another_with_several_ranks_has_a_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--model={model}", "--data-parallel-size=2"]
    roomy = ours([*flags, "--encoder-cache-tokens=100000"])
    assert roomy.scheduler_config.encoder_cache_size == 100_000
    found = set(differences(roomy, theirs(flags, monkeypatch)))
    assert found - DRAWN == ON_PURPOSE.keys() - DRAFTING - OF_CLIENTS - OUR_CONNECTOR


@pytest.mark.parametrize(
    ("connector", "ours_alone"), [(KV_CONNECTOR, set[str]()), (EC_CONNECTOR, OUR_CONNECTOR)]
)
@pytest.mark.parametrize("wanted", [False, True])
def test_a_connector_does_not_open_an_engine_to_embeddings_of_clients(
    model: Path,
    wanted: bool,
    connector: str,
    ours_alone: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [f"--model={model}", connector, *(["--enable-mm-embeds"] if wanted else [])]
    config = ours(flags)
    media = config.model_config.get_multimodal_config()
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (wanted, False)
    found = set(differences(config, theirs(flags, monkeypatch)))
    opened = {name for name in OF_CLIENTS if not (wanted and "enable" in name)}
    assert found - DRAWN - ALWAYS == opened | ours_alone


def test_no_fewer_encodings_are_kept_than_vllm_keeps(model: Path) -> None:
    config = ours([f"--model={model}", "--encoder-cache-tokens=1"]).scheduler_config
    assert config.encoder_cache_size == config.max_num_batched_tokens


def test_what_the_user_gives_is_as_in_vllms_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        f"--model={model}",
        "--prefix-caching-hash-algo=sha256",
        '--kv-events-config={"enable_kv_cache_events": false}',
        "--max-num-seqs=7",
        "--max-num-batched-tokens=4097",
    ]
    found = set(differences(ours(flags), theirs(flags, monkeypatch)))
    assert found - DRAWN == {"profiler_config.ignore_frontend", "structured_outputs_config"}


def test_engines_are_spawned_as_by_vllms_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_HOST_IP", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    prepare_environment("127.0.0.1")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    prepare_environment("127.0.0.1")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork", "the user's"


def test_what_no_frontend_takes_is_refused_at_the_start() -> None:
    config = StructuredOutputsConfig(backend="lm-format-enforcer")
    args = AsyncEngineArgs(model="m", structured_outputs_config=config)
    with pytest.raises(ConfigurationError, match=r"--structured-outputs-config .* to auto"):
        check_arguments(args)
