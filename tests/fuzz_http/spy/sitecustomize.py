"""What each interpreter that is spied on runs first: notes audit events about a canary.

``spy.c`` sees files and sockets whatever code touches them. Imports, what is compiled, and
processes that are started are Python's own affair, and told here, with the place in the code.
"""

import os
import sys
import traceback

_MARK = "mmcanary"
_LOG = os.environ.get("FUZZ_SPY_LOG")
_QUIET = ("object.", "marshal.", "code.__new__", "sys._", "builtins.id")
"""Events that come by the thousand and touch nothing."""


def _about(argument: object) -> bool:
    if isinstance(argument, str):
        return _MARK in argument
    if isinstance(argument, bytes):
        return _MARK.encode() in argument
    if isinstance(argument, list | tuple):
        return any(map(_about, argument))
    return False


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(_QUIET) or not _about(arguments):
        return
    place = traceback.extract_stack(sys._getframe(1), limit=6)
    where = " < ".join(f"{each.filename}:{each.lineno}" for each in reversed(place))
    text = repr(arguments).replace("\t", " ")
    text = text[max(0, text.find(_MARK) - 100) :][:300]  # the number comes after the mark
    line = f"{event}\t{text} at {where}\n".encode("utf-8", "backslashreplace")
    descriptor = os.open(str(_LOG), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


if _LOG:
    sys.addaudithook(_note)
