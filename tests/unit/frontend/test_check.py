"""``mmrouter doctor``, and what an installation has to be able to decode."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.multimodal import audio
from vllm.utils.import_utils import PlaceholderModule

from frontend import check
from frontend.args import parse
from frontend.fetch import FILM, PICTURE, SOUND, limit_decoders, probe_formats
from frontend.media_limits import FetchPolicy
from tests.e2e.processes import run_python

REQUIRED = {
    PICTURE: {"BMP", "DIB", "GIF", "ICO", "JPEG", "PNG", "PPM", "QOI", "TIFF", "WEBP"},
    SOUND: {
        "WAV", "Wave64", "AIFF", "AU", "CAF", "FLAC", "MP3", "Ogg Vorbis", "Ogg Opus",
        "WebM Opus", "AAC", "M4A", "AC-3", "AMR", "WavPack",
    },
    FILM: {
        "MP4 H.264", "MP4 HEVC", "MP4 MPEG-4", "WebM VP8", "WebM VP9", "Matroska H.264",
        "QuickTime ProRes", "QuickTime MJPEG", "AVI MPEG-4", "ASF WMV", "FLV", "MPEG-2",
        "MPEG-TS H.264", "MXF MPEG-2", "IVF VP9", "GIF",
    },
}  # fmt: skip
"""What docs/media.md promises, on any build."""


def test_an_installation_decodes_what_is_promised() -> None:
    policy = FetchPolicy()
    limit_decoders(policy)
    found = list(probe_formats(policy))
    for kind, names in REQUIRED.items():
        works = {each.name for each in found if each.kind == kind and each.works}
        assert names - works == set(), [each for each in found if not each.works]


def run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frontend", *flags],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_says_what_is_there_and_that_it_can_serve() -> None:
    done = run_python("-m", "frontend", "--check", "--mm-arena-gb=0.01")
    assert done.returncode == 0, done.stdout
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert any(line.startswith("mmrouter ") for line in done.stdout.splitlines())
    assert "torchaudio" in lines["resampler"]
    assert "JPEG" in lines["pictures"] and "MP3" in lines["sounds"] and "VP9" in lines["films"]
    assert lines["platform of vLLM"]
    assert "an arena of 0.01 GiB (--mm-arena-gb) fits" in lines["/dev/shm"]
    assert "open files" in lines and "NIXL" in lines
    assert done.stdout.splitlines()[-1] == "this frontend can serve"


def test_it_says_why_it_could_not_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMO_MM_TRANSFER", "shm")
    assert check.run(["--mm-arena-gb=1000000"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("can't serve: an arena of 1000000.00 GiB (--mm-arena-gb) does not fit")


def test_wrong_flags_are_wrong_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        check.run(["--nonsense"])
    assert "--nonsense" in capsys.readouterr().err


def test_an_installation_without_a_resampler_serves_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audio, "torchaudio", PlaceholderModule("torchaudio_of_nobody"))
    resampler = audio._get_torchaudio_resampler
    inspect.unwrap(resampler, stop=lambda each: hasattr(each, "cache_clear")).cache_clear()
    report = check.inspect_machine(parse(["--mm-arena-gb=0"]))
    assert "resampler: none" in report.lines
    (said,) = (each for each in report.refused if each.startswith("sounds of another rate"))
    assert "torchaudio_of_nobody is not installed" in said
    assert report.faults == []


def test_a_fleet_key_that_is_of_no_use() -> None:
    done = run("--check", "--fleet-key-file=/nonexistent")
    assert done.returncode == 2
    assert "error: the fleet key /nonexistent can't be read" in done.stderr


def test_packages_that_do_not_fit_each_other_are_told(tmp_path: Path) -> None:
    """As torchaudio for CUDA beside a CPU build of PyTorch."""
    (tmp_path / "torchaudio.py").write_text("raise OSError('Could not load this library: x.so')")
    done = run("--check", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 1
    assert done.stdout.startswith("can't serve: what vLLM needs can't be loaded (Could not load")
