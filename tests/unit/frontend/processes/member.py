"""A process as a frontend of several has them, without vLLM: says its name to who connects, or
what a test asks for.

    python -m tests.unit.frontend.processes.member DIRECTORY [UDS]

What it does in other cases stands in files of the directory: ``fail`` (end with that status before
it plans), ``fail-later`` (before it serves), ``fail-NAME`` (likewise, one process; a number below 0
is that of a signal), ``silent-NAME`` (answers no question), ``deaf-NAME`` (does not end when it is
to), ``busy-NAME`` (drains for a second, and writes there whether it was let).
"""

import asyncio
import os
import sys
from pathlib import Path

from common.aio.processes import StopSignals
from common.identity import MmHash
from common.transfer.arena import EncodedItem
from frontend.processes import Plan, Siblings

DIRECTORY = Path(sys.argv[1])


def fail_if(name: str) -> None:
    if (DIRECTORY / name).exists():
        status = int((DIRECTORY / name).read_text())
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)


async def serve(siblings: Siblings) -> None:
    signals = StopSignals()
    await siblings.attach(signals)
    siblings.tell("odd", lambda _: b"%d" % (1 // 0))
    siblings.tell("much", lambda size: b"x" * int(size))
    if not (DIRECTORY / f"silent-{siblings.name}").exists():
        siblings.tell("name", lambda argument: argument + siblings.name.encode())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while question := (await reader.readline()).decode().strip():
            writer.write((await reply(siblings, question) + "\n").encode())
        writer.close()

    servers = [await asyncio.start_server(answer, sock=each) for each in siblings.listeners]
    fail_if("fail-later")
    fail_if(f"fail-{siblings.name}")
    siblings.serving()
    await signals.asked()
    for server in servers:
        server.close()
    if (DIRECTORY / f"deaf-{siblings.name}").exists():
        await asyncio.Event().wait()
    if (busy := DIRECTORY / f"busy-{siblings.name}").exists():
        busy.write_text("cut short" if await signals.at_once(1.0) else "drained")
    siblings.close()


async def reply(siblings: Siblings, question: str) -> str:
    if question == "name":
        return f"{siblings.name} {os.getpid()} {os.getppid()}"
    if question == "all":
        told = await siblings.ask("name", b"I am ")
        return repr(dict(sorted(told.items())))
    if question == "odd":
        return repr(await siblings.ask("odd"))
    if question.startswith("much "):
        told = await siblings.ask("much", question.split()[1].encode())
        return str([len(each) for each in told.values()])
    assert siblings.arena is not None
    arena, (command, name) = siblings.arena, question.split()
    if command == "put":
        encoded = EncodedItem(name.encode(), [])
        (await asyncio.to_thread(arena.put, MmHash(name), encoded, "note")).release()
        return "done"
    lease = await asyncio.to_thread(arena.lease, MmHash(name))
    return "none" if lease is None else bytes(lease.memory[64:]).decode()


def main() -> None:
    siblings = Siblings.join()
    assert siblings is not None
    fail_if("fail")
    uds = sys.argv[2] if len(sys.argv) > 2 else None
    siblings.begin(Plan("127.0.0.1", 0, uds, 1 << 20, True))
    asyncio.run(serve(siblings))


if __name__ == "__main__":
    main()
