from argparse import Namespace

import pytest

from common.errors import ConfigurationError
from frontend.args import parse
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


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("ISOLATE_API_KEYS", ["maybe", "2"]),
        ("TRUST_REMOTE_CODE", ["trusted"]),
        ("NIXL_ALLOW_TCP", ["never"]),
        ("NVTX", ["onn"]),
        ("MM_ARENA_GB", ["x", "nan", "inf", "-1"]),
        ("DRAIN_TIMEOUT", ["x", "nan", "inf", "-1"]),
        ("LOG_LEVEL", ["x", "INFO"]),
        ("DISCOVERY", ["etcd://host", "/run/cards", "file://host/run/cards"]),
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
