"""Flags, their twins in the environment, and vLLM's own two."""

import argparse
from pathlib import Path

import pytest

from common.errors import ConfigurationError
from frontend.fetch.settings import MediaSettings


def settings(
    *argv: str, domains: list[str] | None = None, path: str = "", **environ: str
) -> MediaSettings:
    parser = argparse.ArgumentParser()
    MediaSettings.add_arguments(parser)
    serve = argparse.Namespace(allowed_media_domains=domains, allowed_local_media_path=path)
    return MediaSettings.with_vllms(parser.parse_args(argv), serve, environ)


def test_defaults_are_safe() -> None:
    chosen = settings()
    assert not chosen.allow_private
    assert chosen.local_root is None
    assert chosen.max_bytes == 256 * 2**20
    assert chosen.cache_bytes == 256 * 2**20
    assert chosen.max_pixels == 8192 * 8192
    assert chosen.max_request_bytes < chosen.held_bytes
    assert chosen.max_request_pixels < chosen.decoding_pixels


def test_limits_of_a_request_and_of_all() -> None:
    chosen = settings(
        "--media-max-per-request=5",
        "--media-max-request-mb=2",
        "--media-max-request-megapixels=1.5",
        "--media-decode-timeout=7",
        MMROUTER_MEDIA_HELD_MB="4",
        MMROUTER_MEDIA_DECODING_MEGAPIXELS="3",
    )
    assert chosen.max_per_request == 5
    assert (chosen.max_request_bytes, chosen.held_bytes) == (2 << 20, 4 << 20)
    assert (chosen.max_request_pixels, chosen.decoding_pixels) == (1_500_000, 3_000_000)
    assert chosen.decode_timeout_s == 7.0


def test_a_request_may_never_have_more_than_there_is() -> None:
    chosen = settings("--media-held-mb=1", "--media-decoding-megapixels=1")
    assert (chosen.max_request_bytes, chosen.max_request_pixels) == (1 << 20, 1_000_000)


def test_flags_beat_the_environment() -> None:
    chosen = settings(
        "--media-allow-private",
        "--media-max-mb=0.5",
        "--media-timeout=2.5",
        MMROUTER_MEDIA_MAX_MB="7",
        MMROUTER_MEDIA_CACHE_MB="0",
        MMROUTER_MEDIA_MAX_PER_REQUEST="2",
    )
    assert chosen.allow_private
    assert (chosen.max_bytes, chosen.timeout_s) == (2**19, 2.5)
    assert (chosen.cache_bytes, chosen.max_per_request) == (0, 2)


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("true", True), ("0", False)])
def test_the_twin_of_allow_private(value: str, allowed: bool) -> None:
    assert settings(MMROUTER_MEDIA_ALLOW_PRIVATE=value).allow_private is allowed
    assert not settings("--no-media-allow-private", MMROUTER_MEDIA_ALLOW_PRIVATE="1").allow_private


def test_flags_of_vllm(tmp_path: Path) -> None:
    chosen = settings(domains=["a.example", "*.b.example"], path=str(tmp_path))
    assert chosen.allowed_domains == ("a.example", "*.b.example")
    assert chosen.local_root == tmp_path


@pytest.mark.parametrize(
    ("argv", "environ", "complaint"),
    [
        (["--media-max-mb=0"], {}, "--media-max-mb='0'"),
        (["--media-max-mb=inf"], {}, "--media-max-mb='inf'"),
        (["--media-timeout=never"], {}, "--media-timeout='never'"),
        (["--media-max-per-request=0"], {}, "--media-max-per-request='0'"),
        ([], {"MMROUTER_MEDIA_ALLOW_PRIVATE": "perhaps"}, "MMROUTER_MEDIA_ALLOW_PRIVATE"),
        ([], {"MMROUTER_MEDIA_MAX_PIXELS": "0"}, "MMROUTER_MEDIA_MAX_PIXELS"),
    ],
)
def test_what_is_unusable_is_named(
    argv: list[str], environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        settings(*argv, domains=None, path="", **environ)


def test_vllms_flags_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--allowed-local-media-path"):
        settings(path=str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="--allowed-media-domains"):
        settings(domains=["http://x"])
