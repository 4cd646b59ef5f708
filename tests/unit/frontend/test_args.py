from argparse import Namespace
from pathlib import Path

import pytest

from common.errors import ConfigurationError
from frontend.args import parse
from frontend.fetch import CONNECTOR_NAME, MediaSettings
from frontend.http import HttpSettings
from frontend.processing import PreprocessSettings
from frontend.processing.renderer import build_config
from tests.fakes.cards import make_card


def test_code_of_models_takes_a_flag_of_the_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([]).serve.trust_remote_code is False
    assert parse(["--trust-remote-code"]).serve.trust_remote_code is True
    for value in ("1", "true"):
        monkeypatch.setenv("MMROUTER_TRUST_REMOTE_CODE", value)
        assert parse([]).serve.trust_remote_code is True
    for value in ("0", "false", ""):
        monkeypatch.setenv("MMROUTER_TRUST_REMOTE_CODE", value)
        assert parse([]).serve.trust_remote_code is False


def test_no_model_is_loaded_with_code_that_is_not_trusted() -> None:
    """Whoever builds a renderer, in whichever process, and whatever the card went through."""
    card = make_card(model={"trust_remote_code": True})
    with pytest.raises(ConfigurationError, match="--trust-remote-code"):
        build_config(card, Namespace(trust_remote_code=False))


@pytest.mark.parametrize("value", ["1", "yes", ""])
def test_vllms_store_of_responses_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It knows no keys: whoever names a response may read, continue and cancel it."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", value)
    with pytest.raises(SystemExit):
        parse([])
    assert "each other's responses" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "0")
    parse([])


def test_no_other_way_to_fetch_media_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's own follows redirects and knows no private addresses."""
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")
    with pytest.raises(SystemExit):
        parse([])
    said = " ".join(capsys.readouterr().err.split())
    assert "without the limits of --media-allow-private" in said
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    parse([])


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("ISOLATE_API_KEYS", ["maybe", "2"]),
        ("TRUST_REMOTE_CODE", ["trusted"]),
        ("NIXL_ALLOW_TCP", ["never"]),
        ("NVTX", ["onn"]),
        ("MM_ARENA_GB", ["x", "nan", "inf", "-1"]),
        ("DRAIN_TIMEOUT", ["x", "nan", "inf", "-1"]),
        ("LOG_LEVEL", ["x", "loud"]),
        ("DISCOVERY", ["etcd://host", "file://host/run/cards"]),
        ("PREPROCESS_WORKERS", ["x", "-1"]),
        ("MAX_BODY_MB", ["x", "inf", "1e305"]),
    ],
)
def test_what_the_environment_says_is_never_taken_for_something_else(
    variable: str,
    values: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        monkeypatch.setenv(f"MMROUTER_{variable}", value)
        with pytest.raises(SystemExit):
            parse(["--api-key=user"])
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert value in said and "error: " in said


# Several processes

DIVIDED = {
    "http": {
        "max_inflight", "max_connections", "body_memory_mb", "pooling_memory_mb",
    },
    "media": {"held_mb", "decoding_megapixels", "cache_mb"},
    "preprocess": {"workers"},
}  # fmt: skip
"""What is limited for the frontend as a whole."""

PER_REQUEST = {
    "max_choices",
    "max_body_mb", "key_share", "body_timeout_s", "send_timeout_s",
    "max_pooling_inputs",
    "allow_private", "timeout_s", "max_mb", "max_pixels",
    "max_per_request", "max_request_mb", "max_request_megapixels", "max_processor_mb",
    "decode_timeout_s",
    "allowed_domains", "local_root", "rules",
}  # fmt: skip
"""What is of one request, one connection or one medium, or a share itself."""


def test_each_limit_is_divided_among_processes_or_is_of_one_request() -> None:
    """Decide on a new one."""
    fields = {
        name
        for kind in (HttpSettings, MediaSettings, PreprocessSettings)
        for name in kind.model_fields
    }
    divided = set().union(*DIVIDED.values())
    assert fields == divided | PER_REQUEST and not divided & PER_REQUEST


@pytest.mark.parametrize("processes", [2, 3, 64])
def test_processes_together_have_what_one_would_have(processes: int) -> None:
    whole = parse([f"--processes={processes}", "--preprocess-workers=5", "--media-held-mb=1e9",
                   "--media-decoding-megapixels=1e9"])  # fmt: skip
    share = whole.share
    for group, names in DIVIDED.items():
        before = getattr(whole, group).model_dump()
        after = getattr(share, group).model_dump()
        for name in names:
            total = after[name] * processes
            if isinstance(before[name], int):  # rounded up, so that each has one
                assert before[name] <= total < before[name] + processes
            else:
                assert total == pytest.approx(before[name])
        assert {name: after[name] for name in after if name not in names} == {
            name: before[name] for name in before if name not in names
        }
    assert share.router == whole.router and share.faults == whole.faults


def test_no_process_has_less_than_one_request_may_take() -> None:
    whole = parse(
        [
            "--processes=64", "--max-inflight=3", "--max-connections=1",
            "--max-body-mb=80", "--body-memory-mb=100", "--media-held-mb=600",
            "--media-decoding-megapixels=900",
        ]
    )  # fmt: skip
    share = whole.share
    assert (share.http.max_inflight, share.http.max_connections) == (1, 1)
    assert share.http.body_memory_bytes == share.http.max_body_bytes == whole.http.max_body_bytes
    for limit in ("max_request_bytes", "max_request_pixels"):
        assert getattr(share.media, limit) == getattr(whole.media, limit)
    # Of the one that is lower: a request may take 1,000 megapixels, but there are 900.
    assert share.media.held_mb == 512.0 and share.media.decoding_megapixels == 900.0
    assert share.preprocess.workers == 0


def test_one_process_has_all() -> None:
    args = parse(["--processes=1"])
    assert args.share is args
    for settings in (args.http, args.media, args.preprocess):
        assert settings.shared_by(1) == settings


def test_a_file_has_both_kinds_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text(
        "router-mode: round-robin\nhttp-port: 9000\nmax_inflight: 5\ntrust-remote-code: true\n"
        "api-key: [secret]\nlog-level: DEBUG\n"
    )
    monkeypatch.setenv("MMROUTER_MAX_INFLIGHT", "6")
    monkeypatch.setenv("MMROUTER_TRUST_REMOTE_CODE", "0")
    args = parse([f"--config={file}", "--cb-timeout-duration-secs", "2"])
    assert (args.router.mode, args.serve.port, args.http.max_inflight) == (
        "round-robin",
        9000,
        6,
    )
    assert args.router.eject_base_s == 2.0
    assert args.serve.trust_remote_code is False
    assert (args.process.log_level.value, args.serve.log_level) == ("debug", "DEBUG")
    text = "\n".join(args.summary)
    assert "mode=round-robin (file)" in text and "max-inflight=6 (environment)" in text
    assert "port=9000 (file)" in text and "secret" not in text


def test_a_variable_of_vllms_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "long")
    with pytest.raises(SystemExit):
        parse([])
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE is unusable: " in capsys.readouterr().err


def test_what_vllm_says_by_default_is_ours_unless_it_is_given() -> None:
    serve = parse([]).serve
    assert (serve.host, serve.enable_prompt_tokens_details) == ("127.0.0.1", True)
    given = parse(["--host=0.0.0.0", "--no-enable-prompt-tokens-details"]).serve
    assert (given.host, given.enable_prompt_tokens_details) == ("0.0.0.0", False)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--max-model-len", "5"], "--max-model-len means nothing here: frontends learn it"),
        (["--headless"], "--headless means nothing here: a frontend has no engine"),
        (["model"], "MODEL means nothing here: the model comes from the workers"),
        # Halves of flags that are read here and not by vLLM.
        (["--trust-remote"], "--trust-remote is unknown; did you mean --trust-remote-code?"),
        (["--shutdown-time", "5"], "did you mean --shutdown-timeout?"),
        (["--otlp-traces=http://a"], "did you mean --otlp-traces-endpoint?"),
        (["--config.x", "a"], "--config must be written in full"),
        (["--router-mod", "kv"], "--router-mod is unknown; did you mean --router-mode?"),
        (["--worker-urls", "http://a"], "--worker-urls is unknown"),
        (["--ssl-ciphers", "ALL"], "--ssl-ciphers does nothing without --ssl-certfile"),
        (["--h11-max-header-count", "0"], "must be 1 or more"),
        (["--port", "70000"], "--port must be 0 to 65535"),
        (["--port=-1"], "--port must be 0 to 65535"),
        (["--api-key="], "--api-key is empty"),
        (["--api-key", "a", ""], "--api-key is empty, which would let everybody in"),
        (["--logging-config.level", "DEBUG"], "argument --logging-config: 1 validation error"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml can't be read"),
        (["--router-mode", "owl"], "--router-mode='owl' is unusable: "),
        # Parts of flags with one dash, which argparse takes for them.
        (["-as", "2"], "-as is unknown; did you mean -asc?"),
        (["-as=2"], "-as is unknown; did you mean -asc?"),
        (["-t", "2"], "-t is unknown"),
        (["-tp", "2"], "--tensor-parallel-size means nothing here"),
        # Nothing, as a shell's variable that is not set.
        (["--host", ""], "--host is empty: leave it out"),
        (["--host= "], "--host is empty"),
        (["--http-host="], "--host is empty"),
        (["--uds="], "--uds is empty: leave it out"),
        (["--ssl-certfile=", "--ssl-keyfile="], "--ssl-certfile is empty: leave it out"),
        (["--discovery="], "--discovery='' is unusable: "),
        (["--otlp-traces-endpoint="], "--otlp-traces-endpoint='' is unusable: it is empty"),
    ],
)
def test_what_would_do_nothing_is_refused(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--processes=2"], "--processes=1"),
        (["--served-model-name=demo"], "give it to the workers"),
    ],
)
def test_what_can_not_be_had_with_several_models(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(["--models-from-cards", "--max-models=2"]).models.max_models == 2
    assert not parse(flags).models.models_from_cards
    with pytest.raises(SystemExit):
        parse(["--models-from-cards", *flags])
    assert reason in capsys.readouterr().err
