"""Read the form of a request into memory, at a cost that grows with its bytes alone.

With Starlette's readers 8 MB of ``&`` took 4 s of the event loop, and files went through the disk.
"""

import io
from collections.abc import Iterator
from typing import Final

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile

from common.errors import RequestRejectedError

MAX_PARTS: Final = 256
"""Parts of one form; the largest of vLLM's models has some 30 fields."""

MAX_HEAD_BYTES: Final = 8 << 10
"""Bytes of the headers of one part."""

_MAX_PARAMETERS: Final = 16
"""Parameters of a part's header. The parser takes milliseconds for thousands."""

MAX_TEXT_BYTES: Final = 1 << 20
"""Bytes of one field that is no file, as in Starlette."""

_MAX_BOUNDARY: Final = 70
"""Bytes of a boundary, by RFC 2046."""

_MAX_PREAMBLE: Final = 64
"""Bytes of empty lines before the first boundary."""

_KIND: Final = b"multipart/form-data"
_END: Final = b"\r\n\r\n"
_CHARSETS: Final = frozenset({b"utf-8", b"utf8", b"us-ascii"})


class _InMemory(io.BytesIO):
    """A file that Starlette reads without a thread."""

    _rolled = False


def read_form(content: bytes, content_type: str) -> FormData:
    """Parse a multipart form; no route reads other kinds. Raises RequestRejectedError."""
    kind, options = parse_options_header(content_type)
    if kind != _KIND:
        return FormData()
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise RequestRejectedError(
            "the Content-Type of a form needs a `boundary` of at most 70 characters: leave the "
            "header to the HTTP library, which knows what it took"
        )
    if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise RequestRejectedError("send the texts of a form in UTF-8")
    return FormData([_part(head, data) for head, data in _parts(content, b"--" + boundary)])


def texts_of(form: FormData) -> dict[str, str | list[str]]:
    """Return the texts as FastAPI takes them: the last of a name, or all if it ends in ``[]``."""
    texts: dict[str, str | list[str]] = {}
    for name, value in form.multi_items():
        if not isinstance(value, str):
            continue
        if name.endswith("[]"):
            several = [each for each in form.getlist(name) if isinstance(each, str)]
            texts.setdefault(name.removesuffix("[]"), several)
        else:
            texts[name] = value
    return texts


def _parts(content: bytes, delimiter: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers and the content of each part."""
    at = content.find(delimiter, 0, _MAX_PREAMBLE + len(delimiter))
    if at < 0 or content[:at].strip(b"\r\n"):
        raise RequestRejectedError("the form does not begin with its boundary")
    at += len(delimiter)
    for _ in range(MAX_PARTS):
        if content.startswith(b"--", at):
            return
        head = content.find(_END, at, at + MAX_HEAD_BYTES)
        end = content.find(b"\r\n" + delimiter, head + len(_END))
        if head < 0 or not content.startswith(b"\r\n", at):
            raise RequestRejectedError(
                f"a part of the form has no headers, or more than {MAX_HEAD_BYTES} bytes of them"
            )
        if end < 0:
            raise RequestRejectedError("the form ends without its last boundary")
        yield content[at:head], content[head + len(_END) : end]
        at = end + 2 + len(delimiter)
    if not content.startswith(b"--", at):
        raise RequestRejectedError(f"the form has more than {MAX_PARTS} parts")


def _part(head: bytes, data: bytes) -> tuple[str, str | UploadFile]:
    headers = []
    for line in head.removeprefix(b"\r\n").split(b"\r\n"):
        name, _, value = line.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    disposition = dict(headers).get(b"content-disposition", b"")
    if disposition.count(b";") > _MAX_PARAMETERS:
        raise RequestRejectedError("a header of a part of the form has too many parameters")
    _, options = parse_options_header(disposition)
    if b"name" not in options:
        raise RequestRejectedError("a part of the form has no `name` in its Content-Disposition")
    field = _decoded(options[b"name"])
    if b"filename" in options:
        file = UploadFile(
            _InMemory(data),
            size=len(data),
            filename=_decoded(options[b"filename"]),
            headers=Headers(raw=headers),
        )
        return field, file
    if len(data) > MAX_TEXT_BYTES:
        raise RequestRejectedError(f"a field of the form has more than {MAX_TEXT_BYTES} bytes")
    return field, _decoded(data)


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")
