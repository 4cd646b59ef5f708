"""A frontend that was told to leave does, whatever its clients do."""

import asyncio

import pytest

from frontend.asgi import Receive, Scope, Send
from frontend.http.server import readiness_gate
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.http.settings import HttpSettings
from tests.unit.frontend.http.serving import serving, with_body
from tests.waiting import until


class TwoSignals:
    """One to leave, and at once the second."""

    async def asked(self) -> None:
        pass

    async def at_once(self, timeout_s: float) -> None:
        pass


class NoFleet:
    def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_client_that_does_not_read_keeps_nobody_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it asked for next waits for it, and waits again to say that it was cancelled."""
    monkeypatch.setattr(readiness_gate, "LAST_WORDS_S", 0.05)
    size = 64 << 20
    paths: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})

    async with serving(app, HttpSettings(send_timeout_s=3600)) as server:
        client = await server.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(with_body(b"1", path="/first") + with_body(b"2", path="/second"))
        await until(lambda: "/second" in paths)
        async with asyncio.timeout(30):
            await readiness_gate.graceful_shutdown(
                TwoSignals(),  # type: ignore[arg-type]
                server.server,
                ReadinessGate(lambda: None),
                NoFleet(),  # type: ignore[arg-type]
                1.0,
            )
        assert not server.state.tasks
