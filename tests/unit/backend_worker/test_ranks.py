"""vLLM's own configuration of each launch: which ranks a worker serves, and what it refuses."""

from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig
from vllm.config import VllmConfig

from backend_worker.args import parse
from backend_worker.engine.config import check_launch, served_ranks
from common.errors import ConfigurationError
from common.vllm_compat.engine_arguments import check_arguments

SIZE_4 = "--data-parallel-size=4"
NO_FILES = ("--skip-tokenizer-init", "--load-format=dummy")  # models have a configuration only


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of a dense model and of a mixture of experts."""
    directory = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(directory / "dense")
    Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_experts=4, **sizes).save_pretrained(
        directory / "moe"
    )
    return directory


def configuration(model: Path, *flags: str) -> VllmConfig:
    engine = parse([f"--model={model}", *NO_FILES, *flags]).engine
    check_arguments(engine)
    return engine.create_engine_config()


@pytest.mark.parametrize(
    ("model", "flags", "ranks"),
    [
        ("dense", [], [0]),
        ("dense", [SIZE_4], [0, 1, 2, 3]),
        ("moe", [SIZE_4], [0, 1, 2, 3]),
        ("moe", [SIZE_4, "--data-parallel-rank=0"], [0]),
        ("moe", [SIZE_4, "--data-parallel-rank=3"], [3]),
        ("moe", [SIZE_4, "--data-parallel-external-lb", "--data-parallel-rank=1"], [1]),
        (
            "moe",
            [SIZE_4, "--data-parallel-external-lb", "--nnodes=4", "--node-rank=2"],
            [2],
        ),
        (
            "dense",
            [SIZE_4, "--data-parallel-hybrid-lb", "--data-parallel-size-local=2"],
            [0, 1],
        ),
        (
            "dense",
            [SIZE_4, "--data-parallel-start-rank=2", "--data-parallel-size-local=2"],
            [2, 3],
        ),
        (
            "moe",
            [
                SIZE_4,
                "--data-parallel-hybrid-lb",
                "--data-parallel-size-local=1",
                "--data-parallel-start-rank=3",
            ],
            [3],  # as vLLM says: with one rank on a node it is external
        ),
        (
            "dense",
            [SIZE_4, "--data-parallel-hybrid-lb", "--data-parallel-size-local=4"],
            [0, 1, 2, 3],
        ),
    ],
)
def test_each_launch_serves_its_ranks(
    models: Path, model: str, flags: list[str], ranks: list[int]
) -> None:
    config = configuration(models / model, *flags)
    check_launch(config)
    assert served_ranks(config.parallel_config) == ranks


@pytest.mark.parametrize(
    ("model", "flags", "match"),
    [
        ("dense", [SIZE_4, "--data-parallel-size-local=2"], "--data-parallel-size-local 2 of 4"),
        ("moe", [SIZE_4, "--data-parallel-size-local=0"], "--data-parallel-size-local 0 of 4"),
        (
            "dense",
            [SIZE_4, "--data-parallel-size-local=1", "--data-parallel-start-rank=1"],
            "without --data-parallel flags",
        ),
        (
            "dense",
            [SIZE_4, "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"],
            "--data-parallel-size-local 2 of 4",
        ),
    ],
)
def test_what_can_t_be_served_is_refused_by_name(
    models: Path, model: str, flags: list[str], match: str
) -> None:
    config = configuration(models / model, *flags)
    with pytest.raises(ConfigurationError, match=match):
        check_launch(config)


def test_vllm_itself_refuses_one_rank_of_a_dense_model(models: Path) -> None:
    with pytest.raises(ValueError, match="launch independent vLLM"):
        configuration(models / "dense", SIZE_4, "--data-parallel-rank=1")


def test_offline_ranks_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    config = configuration(models / "moe")
    with pytest.raises(ConfigurationError, match="VLLM_DP_SIZE is for vLLM's offline"):
        check_launch(config)


def test_a_supervisor_of_servers_is_refused(models: Path) -> None:
    engine = parse([f"--model={models / 'moe'}", *NO_FILES]).engine
    engine.data_parallel_multi_port_external_lb = True
    with pytest.raises(ConfigurationError, match="--data-parallel-multi-port-external-lb"):
        check_arguments(engine)


def test_a_headless_node_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model=m", "--headless"])
    assert "--data-parallel-hybrid-lb" in capsys.readouterr().err
