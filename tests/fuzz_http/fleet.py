"""A frontend with the flags under test, over simulated engines, with spies in both."""

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from tests.e2e.conftest import wait_for_workers
from tests.e2e.processes import HttpServer, Process, start_worker
from tests.fuzz_http.canaries import Canaries
from tests.fuzz_http.schema import Api
from tests.ports import free_port
from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import EXECUTOR


@dataclass(frozen=True)
class Kind:
    """What is served, and how.

    Attributes:
        worker: flags of the worker.
        frontend: flags of the frontend, whose others are the defaults.
        environment: of the frontend.
        caches: whether engines keep blocks of prompts, of which frontends wait to hear.
    """

    worker: tuple[str, ...] = ()
    frontend: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    caches: bool = True


_A_OR_B: Final = json.dumps(
    {
        "classifier_from_token": ["a", "b"],
        "method": "from_2_way_softmax",
        "text_config": {"tie_word_embeddings": False},
    }
)
TRUSTING: Final = (
    "--trust-request-chat-template", "--trust-request-mm-kwargs", "--enable-scale-out",
    "--enable-tokenizer-info-endpoint",
)  # fmt: skip
"""What is for users that are trusted."""

SPEECH: Final = Kind(("--load-format=sharded_state", "--max-model-len=448"), caches=False)
"""Of a model that writes down what it hears."""

KINDS: Final[Mapping[str, Kind]] = {
    "chat": Kind(frontend=("--enable-auto-tool-choice", "--tool-call-parser=hermes")),
    "embed": Kind(("--runner=pooling", "--convert=embed")),
    "rerank": Kind(("--runner=pooling", "--convert=classify", f"--hf-overrides={_A_OR_B}")),
    "trusting": Kind(("--enable-prompt-embeds", "--enable-mm-embeds"), TRUSTING),
}
FAST: Final = GpuModel(step_ms=1.0, prefill_ms=0.0, encoder_ms=0.0, context_ms=0.0, kv_tokens=65536)


class Fleet:
    """A worker and a frontend."""

    def __init__(
        self, kind: Kind, model: Path, directory: Path, canaries: Canaries, *flags: str
    ) -> None:
        """
        Args:
            directory: for logs, cards and sockets; made.
            flags: of the frontend, beside those of the kind.
        """
        directory.mkdir(parents=True)
        self._kind = kind
        self._meter: socket.socket | None = None
        self._meter_path = directory / "meter"
        environment = canaries.environment
        cards = directory / "cards"
        self.worker: Process = start_worker(
            "simulated",
            model,
            cards,
            directory,
            EXECUTOR,
            "--max-model-len=2048",
            *kind.worker,
            env=environment | FAST.to_env(),
        )
        port = free_port()
        command = [
            sys.executable, "-m", "tests.fuzz_http.watched_frontend", str(self._meter_path),
            f"--discovery={cards}", f"--port={port}", "--mm-arena-gb=0.06",
            *kind.frontend, *flags,
        ]  # fmt: skip
        self.frontend = HttpServer(
            "frontend",
            command,
            directory / "frontend.log",
            port,
            **environment,
            **kind.environment,
        )

    def wait(self) -> None:
        """Wait until it serves, three times as long as tests do: other work may have the cores."""
        for left in (2, 1, 0):
            try:
                if self._kind.caches:
                    wait_for_workers(self.frontend, [self.worker])
                else:
                    self.frontend.wait_for_status(200)
                break
            except AssertionError:
                if self.dead() or not left:
                    raise
        self._meter = meter = socket.socket(socket.AF_UNIX)
        meter.settimeout(120)
        meter.connect(str(self._meter_path))
        self.stall_s()

    def api(self) -> Api:
        return Api(httpx.get(f"{self.frontend.url}/openapi.json", timeout=60).json())

    def dead(self) -> str:
        """Who has ended, if anybody."""
        return ", ".join(
            process.name for process in (self.frontend, self.worker) if not process.is_alive()
        )

    def stall_s(self) -> float:
        """Return the longest time since the last call that the event loop gave nobody a turn."""
        assert self._meter is not None, "nobody waited for the frontend"
        self._meter.sendall(b"\n")
        with self._meter.makefile() as answers:
            answer: dict[str, float] = json.loads(answers.readline())
        return answer["stall_s"]

    def memory_mb(self) -> float:
        """Return what the frontend has in memory of its own, in MiB."""
        return self._status("RssAnon") / 1024

    def peak_mb(self) -> float:
        """Return the most that it had in memory since :meth:`forget_peak`, in MiB."""
        return self._status("VmHWM") / 1024

    def resident_mb(self) -> float:
        """Return what it has in memory, as :meth:`peak_mb` counts, in MiB."""
        return self._status("VmRSS") / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.frontend.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.frontend.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise ProcessLookupError(f"the frontend has no {name}")

    def stop(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self.frontend.stop()
        self.worker.stop()
