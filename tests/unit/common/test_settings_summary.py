import logging
import re
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.cli.command_line import FRONTEND, ConfigSettings, read_command_line
from common.cli.flag_settings import Given
from common.cli.process_settings import ProcessSettings
from common.cli.settings_summary import log_settings, shown, summary
from common.discovery.settings import DiscoverySettings


def test_each_value_says_who_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("drain-timeout: 5\nlog-level: debug")
    monkeypatch.setenv("MMROUTER_NVTX", "1")
    groups = (ConfigSettings, ProcessSettings)
    argv = [f"--config={file}", "--log-level=warning"]
    line = read_command_line(ArgumentParser(), groups, FRONTEND, argv)
    given = {"port": Given("file", "f.yaml: port", 9000)}
    lines = summary(line.ours, groups, given, {"port": 8000, "host": "127.0.0.1"})
    assert lines == [
        f"configuration: config={file} (flag)",
        "process: drain-timeout=5 s (file), nvtx=on (environment), log-level=warning (flag); "
        "by default log-format=text",
        "vLLM: port=9000 (file); by default host=127.0.0.1",
    ]


@dataclass
class Transfer:
    """As vLLM's structured arguments."""

    extra: dict[str, str]
    size: int = 5


def test_no_secret_is_shown(tmp_path: Path) -> None:
    groups = (DiscoverySettings,)
    argv = ["--discovery=etcd://host:1/p"]
    line = read_command_line(ArgumentParser(), (ConfigSettings, *groups), FRONTEND, argv)
    given = {
        "api_key": Given("flag", "--api-key", ["secret"]),
        "hf_token": Given("flag", "--hf-token", "secret"),
        "model_loader_extra_config": Given(
            "flag", "", {"s3_secret_access_key": "secret", "deep": [{"token": "secret"}], "a": 5}
        ),
        "otlp_traces_endpoint": Given("flag", "", "https://user:secret@host"),
    }
    given["kv_transfer_config"] = Given("flag", "", Transfer({"access_key": "secret"}))
    text = "\n".join(summary(line.ours, groups, given, {}))
    assert "secret@" not in text and "=secret" not in text and ": secret" not in text
    assert "kv-transfer-config={extra: {access_key: ***}}" in text
    assert "a: 5" in text and "https://***host" in text and "api-key=***" in text


def test_values_look_as_somebody_would_write_them() -> None:
    values = (True, 0.5, 60.0, 1e-7, 123456789.5, [1, "a"], None, Path("/a"))
    assert [shown(value) for value in values] == [
        "on", "0.5", "60", "1e-07", "123456789.5", "[1, a]", "None", "/a",
    ]  # fmt: skip


def test_what_runs_here_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_settings(logging.getLogger("frontend"), ["routing: by default router-mode=kv"])
    first, second = caplog.messages
    assert re.fullmatch(r"mmrouter \S+ \(vLLM \S+\), platform of vLLM: \w+", first)
    assert second == "in force, routing: by default router-mode=kv"
