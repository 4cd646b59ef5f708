"""A worker's flags reach the frontend: from them to a card, and from it to vLLM's configuration
of the frontend, which must be the worker's in everything that matters. No engine."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm import AsyncEngineArgs, envs
from vllm.config import MultiModalConfig, VllmConfig

from backend_worker import args as worker_args
from backend_worker.engine.config import engine_config, with_our_defaults
from backend_worker.engine.vllm_engine import Engine
from common.errors import CardIncompatibleError, ConfigurationError
from common.request_plane.card import WorkerCard, check_compatible
from common.vllm_compat.engine_arguments import IRRELEVANT, check_arguments
from common.vllm_compat.engine_settings import (
    engine_settings,
    environment_settings,
    model_settings,
    output_settings,
)
from frontend import args as frontend_args
from frontend.processing.renderer import build_config
from tests.demo_model import shared_demo_model
from tests.fakes.cards import make_card

RESOLVED = {"runner", "convert"}
"""The card has what vLLM made of them, which is compared too: ``runner_type``, ``convert_type``."""

OF_THE_ENGINE = {"quantization", "logits_processors"}
"""On the card to be compared, not to be followed."""

MADE_OF_OTHERS = {"original_max_model_len", "_pooler_config_sources"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_demo_model(tmp_path_factory)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """vLLM's variables are as they were afterwards."""
    before = {name: value for name, value in vars(envs).items() if name.startswith("VLLM_")}
    yield
    for name in [name for name in vars(envs) if name.startswith("VLLM_")]:
        delattr(envs, name)
    vars(envs).update(before)


def worker(model: Path, *flags: str) -> tuple[VllmConfig, WorkerCard]:
    """What vLLM makes of a worker's flags, and the card."""
    args = worker_args.parse([f"--model={model}", *flags])
    engine: AsyncEngineArgs = with_our_defaults(args.engine, args.engine_given)
    config = engine_config(engine)
    card = make_card().model_copy(
        update={
            "served_model_names": [config.model_config.served_model_name],
            "model": model_settings(config.model_config),
            "output": output_settings(config),
            "environment": environment_settings(),
            "engine": engine_settings(engine),
        }
    )
    return config, WorkerCard.from_json(card.to_json())


def serve_args(*flags: str) -> Namespace:
    return frontend_args.parse(list(flags)).serve


def differences(here: object, there: object) -> dict[str, tuple[Any, Any]]:
    """Fields of two configurations that differ and that a frontend should know of."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(here).items():
        other = getattr(there, name)
        if name in IRRELEVANT.keys() | RESOLVED | OF_THE_ENGINE | MADE_OF_OTHERS:
            continue
        if isinstance(value, MultiModalConfig):
            found |= differences(value, other)
        elif isinstance(value, PretrainedConfig):
            if value.to_dict() != other.to_dict():
                found[name] = (value, other)
        elif value != other:
            found[name] = (value, other)
    return found


FLAGS: list[list[str]] = [
    [],
    ["--no-mm-device-do-normalize"],
    ["--mm-device-do-normalize"],
    ["--model-impl=transformers"],
    ["--video-pruning-rate=0.5", "--video-pruning-method=vidcom2"],
    ["--runner=pooling", "--convert=embed"],
    ["--runner=pooling", "--convert=embed", '--pooler-config={"seq_pooling_type": "MEAN"}'],
    ["--hf-config-path={model}"],
    ["--tokenizer={model}", "--tokenizer-mode=hf"],
    ["--dtype=bfloat16", "--max-model-len=777"],
    ["--skip-tokenizer-init"],
    ['--hf-overrides={"text_config": {"rope_theta": 5.0}, "vision_start_token_id": 9}'],
    ["--generation-config=vllm", '--override-generation-config={"temperature": 0.5}'],
    ["--max-logprobs=7", "--logprobs-mode=processed_logits"],
    ["--language-model-only"],
    ['--limit-mm-per-prompt={"image": 3, "video": {"count": 1, "num_frames": 8}}'],
    ['--mm-processor-kwargs={"max_pixels": 12544}', "--mm-processor-device=cpu"],
    ['--media-io-kwargs={"video": {"num_frames": 5}}'],
    ["--mm-hasher-algorithm=sha512", "--interleave-mm-strings"],
    ["--enable-mm-embeds", "--enable-prompt-embeds"],
    ['--structured-outputs-config={"backend": "guidance", "disable_any_whitespace": true}'],
    ["--reasoning-parser=qwen3"],
    ["--reasoning-parser=qwen3", '--reasoning-config={"reasoning_end_str": "</think> So:"}'],
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_a_frontend_has_the_configuration_of_its_workers(model: Path, flags: list[str]) -> None:
    flags = [flag.replace("{model}", str(model)) for flag in flags]
    theirs, card = worker(model, *flags)
    made = serve_args()
    for _ in range(2):  # as in a process for media, which gets the arguments that we changed
        ours = build_config(card, made)
        assert differences(theirs.model_config, ours.model_config) == {}
        assert output_settings(ours) == output_settings(theirs)
        assert model_settings(ours.model_config) == card.model
    assert (ours.reasoning_config is None) == (theirs.reasoning_config is None)
    if theirs.reasoning_config is not None:
        assert ours.reasoning_config is not None
        assert ours.reasoning_config.enabled == theirs.reasoning_config.enabled


@pytest.mark.parametrize("newer", ["0", "1"])
def test_what_only_a_newer_model_runner_can_do_follows_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, newer: str
) -> None:
    config, card = worker(model)
    does = {"enable_trace_replay": True, "return_sampling_mask": True}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", newer)
    engine: Any = SimpleNamespace(_llm=SimpleNamespace(vllm_config=config), ranks=[0])
    told = card.model_copy(
        update={"model": card.model.model_copy(update=does), "capacity": Engine.capacity(engine)}
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    ours = build_config(told, serve_args())
    assert ours.model_config.enable_trace_replay and ours.model_config.return_sampling_mask
    assert ours.use_v2_model_runner == (newer == "1")


def test_the_way_to_load_videos_follows_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    _, card = worker(model)
    monkeypatch.delenv("VLLM_VIDEO_LOADER_BACKEND")
    build_config(card, serve_args())
    assert envs.VLLM_VIDEO_LOADER_BACKEND == "opencv_dynamic"


def test_a_longer_context_than_the_model_claims_follows_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    _, card = worker(model, "--max-model-len=99999999")
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    assert build_config(card, serve_args()).model_config.max_model_len == 99999999


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--mm-device-do-normalize"], []),
        (['--limit-mm-per-prompt={"image": 3}'], ['--limit-mm-per-prompt={"image": {"count": 3}}']),
        (["--tokenizer={model}"], []),
        (["--video-pruning-rate=0"], []),
        (["--runner=generate"], []),
        (["--dtype=float32"], ["--dtype=float"]),
    ],
)
def test_workers_that_mean_the_same_have_the_same_card(
    model: Path, one: list[str], other: list[str]
) -> None:
    _, ours = worker(model, *[flag.replace("{model}", str(model)) for flag in one])
    _, theirs = worker(model, *other)
    check_compatible(ours, theirs)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--no-mm-device-do-normalize"], "model.mm_device_do_normalize"),
        (["--model-impl=transformers"], "model.model_impl"),
        (["--video-pruning-rate=0.5"], "model.video_pruning_rate"),
        (["--runner=pooling"], "model.runner"),
        (["--logits-processors=a.b:C"], "engine.logits_processors"),
        (['--structured-outputs-config={"backend": "guidance"}'], "output.backend"),
    ],
)
def test_workers_of_other_meaning_are_refused_by_field(
    model: Path, flags: list[str], field: str
) -> None:
    _, ours = worker(model)
    _, theirs = worker(model, *flags)
    with pytest.raises(CardIncompatibleError) as caught:
        check_compatible(ours, theirs)
    assert caught.value.field == field


def connector(name: str, role: str = "ec_both", **more: object) -> str:
    extra = {"ec_cpu_bytes": 1 << 20, **more}
    config = {"ec_connector": name, "ec_role": role, "ec_connector_extra_config": extra}
    return f"--ec-transfer-config={json.dumps(config)}"


def test_encodings_may_be_kept_in_the_hosts_memory(model: Path) -> None:
    worker(model, connector("ECCPUConnector"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (['--watermark-config={"key": 1}'], "--watermark-config"),
        (['--default-mm-loras={"image": "adapter"}'], "--default-mm-loras"),
        (["--mm-encoder-only"], "--mm-encoder-only"),
        (["--reasoning-parser-plugin=/a.py"], "--reasoning-parser-plugin"),
        (
            ['--structured-outputs-config={"reasoning_parser_plugin": "/a.py"}'],
            "--reasoning-parser-plugin",
        ),
        (['--mm-processor-kwargs={"device": "cuda"}'], "--mm-processor-device"),
        ([connector("ECCPUConnector", "ec_producer")], "--ec-transfer-config"),
        ([connector("ECCPUConnector", "ec_consumer")], "--ec-transfer-config"),
        ([connector("ECCPUConnector", ec_enable_nixl=True)], "--ec-transfer-config"),
        ([connector("ECExampleConnector")], "--ec-transfer-config"),
        ([connector("ECMooncakeConnector")], "--ec-transfer-config"),
    ],
)
def test_what_no_frontend_can_follow_is_refused_by_name(
    model: Path, flags: list[str], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{named} is not for a worker of a fleet: "):
        worker(model, *flags)


def test_a_function_is_refused(model: Path) -> None:
    engine = worker_args.parse([f"--model={model}"]).engine
    engine.hf_overrides = lambda config: config
    with pytest.raises(ConfigurationError, match="--hf-overrides"):
        check_arguments(engine)


def test_videos_decoded_on_a_gpu_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiModalConfig, "use_gpu_video_backend", lambda self: True)
    with pytest.raises(ConfigurationError, match="--media-io-kwargs"):
        worker(model)


def test_a_card_has_no_code_loaded(model: Path) -> None:
    """Whoever runs the frontend has to name it as well."""
    override = {"Qwen2VLForConditionalGeneration": "vllm.model_executor.models.qwen2_vl:Nothing"}
    _, card = worker(model)
    asking = card.model_copy(
        update={"model": card.model.model_copy(update={"model_class_overrides": override})}
    )
    with pytest.raises(ConfigurationError, match="give --model-class-overrides to both"):
        build_config(asking, serve_args())
    with pytest.raises(ConfigurationError, match="give --model-class-overrides to both"):
        build_config(card, serve_args(f"--model-class-overrides={json.dumps(override)}"))


def test_a_parser_of_the_frontends_own_stays_unless_the_worker_has_another(model: Path) -> None:
    _, without = worker(model)
    own = build_config(without, serve_args("--reasoning-parser=deepseek_r1"))
    assert own.structured_outputs_config.reasoning_parser == "deepseek_r1"
    _, with_another = worker(model, "--reasoning-parser=qwen3")
    with pytest.raises(ConfigurationError, match=r"--reasoning-parser=qwen3.*deepseek_r1"):
        build_config(with_another, serve_args("--reasoning-parser=deepseek_r1"))


def test_what_comes_out_otherwise_here_is_refused_by_field(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, card = worker(model)
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    with pytest.raises(ConfigurationError, match=r"model\.mm_device_do_normalize True.*False"):
        build_config(card, serve_args())
    with pytest.raises(ConfigurationError, match=r"model\.mm_processor_kwargs"):
        processed = card.model.model_copy(update={"mm_processor_kwargs": {"device": 5}})
        monkeypatch.setattr(
            MultiModalConfig, "fold_mm_processor_device", staticmethod(lambda kwargs, _: {})
        )
        build_config(card.model_copy(update={"model": processed}), serve_args())


def test_directories_are_known_by_their_whole_path(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    flags = [f"--{name}={model.name}" for name in ("tokenizer", "hf-config-path")]
    args = worker_args.parse([f"--model={model.name}", *flags, f"--generation-config={model.name}"])
    engine = with_our_defaults(args.engine, args.engine_given)
    assert engine.model == engine.tokenizer == engine.hf_config_path == str(model)
    assert engine.generation_config == str(model)
