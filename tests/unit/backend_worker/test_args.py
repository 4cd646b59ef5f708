from pathlib import Path

import pytest

from backend_worker.args import parse
from backend_worker.engine.config import with_our_defaults
from common.transfer.nixl_processes.network import NixlNetwork
from common.transfer.transports import TransferMode


def test_engine_flags_reach_vllm_and_ours_do_not() -> None:
    args = parse(
        ["--model", "m", "--worker-id", "w", "--max-model-len", "99", "--nixl-memory-mb", "3"]
    )
    assert args.worker_id == "w"
    assert args.nixl.memory_mb == 3
    assert args.engine.model == "m"
    assert args.engine.max_model_len == 99
    assert args.engine_given == {"model", "max_model_len"}


def test_hashes_and_events_are_what_routing_needs() -> None:
    args = parse(["--model", "m"])
    engine = with_our_defaults(args.engine, args.engine_given)
    assert engine.prefix_caching_hash_algo == "sha256_cbor"
    assert engine.kv_events_config is not None
    assert engine.kv_events_config.enable_kv_cache_events


def test_what_the_user_says_is_left_alone() -> None:
    args = parse(
        ["--model", "m", "--prefix-caching-hash-algo", "sha256", "--kv-events-config", "{}"]
    )
    engine = with_our_defaults(args.engine, args.engine_given)
    assert engine.prefix_caching_hash_algo == "sha256"
    assert engine.kv_events_config is not None
    assert not engine.kv_events_config.enable_kv_cache_events


def test_workers_without_a_name_get_different_ones() -> None:
    assert parse(["--model", "m"]).worker_id != parse(["--model", "m"]).worker_id


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, TransferMode.AUTO),
        ({"DYNAMO_MM_TRANSFER": "nixl"}, TransferMode.NIXL),
        ({"DYNAMO_DISABLE_NIXL_MM": "1"}, TransferMode.DISABLED),
        ({"DYNAMO_DISABLE_NIXL_MM": "0", "DYNAMO_MM_TRANSFER": "shm"}, TransferMode.SHM),
    ],
)
def test_the_transfer_mode_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: TransferMode
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert parse(["--model", "m"]).transfer is mode


def test_nixl_stays_on_this_host_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--model", "m"]).network == NixlNetwork()
    flags = ["--model", "m", "--nixl-interface", "eth0", "--nixl-allow-tcp"]
    assert parse(flags).network == NixlNetwork("eth0", allow_tcp=True)
    assert parse(["--model", "m", "--nixl-interface", ""]).network == NixlNetwork()
    monkeypatch.setenv("MMROUTER_NIXL_INTERFACE", "mlx5_0:1,mlx5_1:1")
    assert parse(["--model", "m", "--nixl-interface="]).network == NixlNetwork()
    monkeypatch.setenv("UCX_TLS", "rc")
    assert parse(["--model", "m"]).network == NixlNetwork("mlx5_0:1,mlx5_1:1", narrowed_to=("rc",))
    monkeypatch.setenv("MMROUTER_NIXL_ALLOW_TCP", "1")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert parse(["--model", "m"]).network.allow_tcp


@pytest.mark.parametrize(
    ("argv", "environment", "complaint"),
    [
        ([], {}, "--model is required"),
        (["--model", "m", "--config", "/nonexistent.yaml"], {}, "/nonexistent.yaml"),
        (["--model", "m"], {"MMROUTER_DISCOVERY": "etcd://x"}, "MMROUTER_DISCOVERY='etcd://x'"),
        (["--model", "m", "--worker-id", "a/b"], {}, "--worker-id='a/b'"),
        (["--model", "m"], {"DYNAMO_MM_TRANSFER": "owl"}, "owl"),
        (["--model", "m"], {"DYNAMO_DISABLE_NIXL_MM": "2"}, "DYNAMO_DISABLE_NIXL_MM='2'"),
        (
            ["--model", "m"],
            {"DYNAMO_DISABLE_NIXL_MM": "1", "DYNAMO_MM_TRANSFER": "shm"},
            "turns transfer off",
        ),
        (["--model", "m", "--no-such-flag"], {}, "no-such-flag"),
        (["m", "--max-model-ln", "5"], {}, "did you mean --max-model-len?"),
        (["m", "--model", "n"], {}, "the model is m and, by --model, n: give one"),
        (["m", "n"], {}, "unexpected argument 'n'"),
        (["m", "--api-key", "k"], {}, "--api-key means nothing here: it is the server's"),
        (
            ["m", "--aggregate-engine-logging"],
            {},
            "--aggregate-engine-logging means nothing here: workers write no statistics",
        ),
        (["m", "--headless"], {}, "--data-parallel-hybrid-lb"),
        (["--model", "m", "--nixl-interface", "all"], {}, "must name devices"),
        (["--model", "m", "--nixl-interface", "^lo"], {}, "must name devices"),
        (["--model", "m"], {"UCX_TLS": "tcp"}, "--nixl-allow-tcp"),
        (["--model", "m", "--discovery", "etcd://host"], {}, "must be at a directory or file:///"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    environment: dict[str, str],
    complaint: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "variable",
    ["WORKER_PORT", "ENCODER_CACHE_TOKENS", "NIXL_MEMORY_MB"],
)
def test_a_wrong_value_in_the_environment_is_a_sentence(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"MMROUTER_{variable}", "many")
    with pytest.raises(SystemExit) as stopped:
        parse(["--model", "m"])
    assert stopped.value.code == 2
    assert "'many'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "", " "])
def test_a_worker_is_reached_at_one_address(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a card these would lead every frontend to itself."""
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--worker-host", host])
    assert "one address of this host" in capsys.readouterr().err


def test_the_model_may_stand_first_as_in_vllm_serve_or_in_the_file(tmp_path: Path) -> None:
    assert parse(["m", "--max-model-len=9"]).engine.model == "m"
    assert parse(["m", "--model=m"]).engine.model == "m"
    file = tmp_path / "worker.yaml"
    file.write_text(
        "model: m\nmax_model_len: 9\nworker-id: w\nshutdown-timeout: 5\nlog-level: info"
    )
    args = parse([f"--config={file}", "--max-model-len=10"])
    assert (args.engine.model, args.engine.max_model_len, args.worker_id) == ("m", 10, "w")
    assert args.engine_given == {"model", "max_model_len"}
    assert (args.process.drain_timeout_s, args.engine.log_level) == (5.0, "INFO")
    assert parse(["m"]).engine.log_level is None
