"""What is pasted from other routers' launch scripts."""

from pathlib import Path

import pytest

from common.cli.command_line import FRONTEND, WORKER
from common.cli.flag_settings import ConfigFile
from common.errors import ConfigurationError


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--http-port", "80"], ["--port=80"]),
        (["--http_port=80"], ["--port=80"]),
        (["--active-prefill-tokens-threshold=9"], ["--router-busy-prefill-tokens=10"]),
        (["--active-prefill-tokens-threshold=None"], ["--router-busy-prefill-tokens=0"]),
        (["--active-decode-blocks-threshold=None"], ["--router-busy-blocks-fraction=1"]),
        (["--active-decode-blocks-threshold=0.5"], ["--router-busy-blocks-fraction=0.5"]),
        (["--policy", "cache_aware"], ["--router-mode=kv"]),
        (["--max-payload-size=1572864"], ["--max-body-mb=1.5"]),
        (["--disable-retries", "--port=1"], ["--migration-limit=0", "--port=1"]),
        (["--cb-timeout-duration-secs=9"], ["--router-eject-base=9"]),
        (["-asc", "2"], ["--processes=2"]),
        (["--shutdown-timeout", "5"], ["--drain-timeout=5"]),
    ],
)
def test_an_alias_becomes_ours(theirs: list[str], ours: list[str]) -> None:
    assert FRONTEND.in_arguments(theirs) == ours


@pytest.mark.parametrize(
    "words",
    [
        ["--router-mode", "kv", "--router-mode=kv"],
        ["model", "-tp", "2", "-O3", "--hf-overrides.a_b", "1", "--x={'a_b': '--http-port'}"],
        ["--chat-template", "a --http-port b", "-1", "-0.5", "-", ""],
        ["--worker-urls", "http://a", "--no-kv-events"],
    ],
)
def test_everything_else_stays(words: list[str]) -> None:
    assert FRONTEND.in_arguments(words) == words
    assert WORKER.in_arguments(words) == words


def test_underscores_become_dashes_in_names_only() -> None:
    assert WORKER.in_arguments(["--max_model_len=a_b"]) == ["--max-model-len=a_b"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "consistent_hash"], "--policy='consistent_hash' is unusable: .*cache_aware"),
        (["--max-payload-size=1e6"], "--max-payload-size='1e6' is unusable"),
        (["--http-port"], "--http-port needs a value"),
        (["--disable-retries=1"], "--disable-retries takes no value"),
    ],
)
def test_a_value_without_a_counterpart_is_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{complaint}"):
        FRONTEND.in_arguments(words)


def in_file(**values: object) -> dict[str, object]:
    file = ConfigFile(Path("f.yaml"), {key.replace("_", "-"): v for key, v in values.items()})
    return dict(FRONTEND.in_file(file).values)


def test_aliases_may_stand_in_the_file() -> None:
    assert in_file(http_port=80, spread=True) == {"port": "80", "spread": True}
    assert in_file(cb_timeout_duration_secs=1.0, http_port=None) == {"router-eject-base": "1.0"}
    assert in_file(disable_retries=True) == {"migration-limit": "0"}
    assert in_file(disable_retries=False) == {}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"http_port": 80, "port": 81}, "http-port says the same as port"),
        ({"port": 81, "http_port": 80}, "http-port says the same as port"),
        ({"policy": "bucket"}, "policy='bucket' is unusable: "),
        ({"disable_retries": "x"}, "disable-retries='x' is neither true nor false"),
    ],
)
def test_a_value_without_a_counterpart_in_the_file(
    values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^f\.yaml: {complaint}"):
        in_file(**values)
