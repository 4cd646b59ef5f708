"""Fetch policy for media: one frozen object that all sources ask.

Pure but for the route look-up in ``addresses.is_own``; fetching, reading and decoding are
elsewhere.
"""

import re
from abc import ABC, abstractmethod
from http import HTTPStatus
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urljoin

from pydantic import BaseModel, ConfigDict, Field, field_validator
from yarl import URL

from common.errors import MmRouterError
from frontend.media_limits.addresses import is_own, is_public, parse_address


class MediaError(MmRouterError):
    """Root of these errors; ``outcome`` is the label of ``mmrouter_media_fetches``."""

    def __init__(self, reason: str, outcome: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome


class RefusedError(MediaError):
    """The policy forbids the reference, or it is malformed."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "refused")


class RequestLimitError(RefusedError):
    """One request exceeds its own limit. Other requests are not affected."""


class UnfetchableError(MediaError):
    """The reference is valid, but its medium is unavailable; a retry may help if ``transient``."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, reason: str, outcome: str, *, transient: bool = False) -> None:
        super().__init__(reason, outcome)
        self.transient = transient


class TooLargeError(UnfetchableError):
    """More bytes than the policy allows."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it is larger than {max_bytes / 2**20:g} MiB", "too_large")


MAX_URL_CHARACTERS = 8192
"""Limit of an http, https or file URL; hardly any server accepts longer ones."""

_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# Resolvers read these as IPv4 addresses, each in its own way: 2130706433, 0x7f.1, 0177.1.
_ENDS_IN_A_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")
_AFTER_AUTHORITY = re.compile(
    r"[a-z]+://[^/?#]+(?P<path>[^?#]*)(\?(?P<query>[^#]*))?(#.*)?", re.IGNORECASE
)
_SENT = "".join(map(chr, range(0x21, 0x7F))).translate(dict.fromkeys(map(ord, '"<>\\^`{}')))
"""Characters of a path or query that are sent unescaped."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Positive = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]


class MediaRule(ABC):
    """Condition of an installed package on where media are fetched from.

    It adds to the policy and can't allow a URL that the policy refuses. A package adds one by an
    entry point of the group ``mmrouter.media_rules``. A frontend has one instance of each.
    """

    @abstractmethod
    def check(self, url: URL) -> None:
        """Raise RefusedError, with a sentence for the user, if a URL may not be fetched.

        It is called on the event loop for each http(s) URL of a request and each redirect, before
        the host is looked up, so it may take microseconds.
        """


class FetchPolicy(BaseModel):
    """Limits on media that requests refer to.

    Attributes:
        allowed_domains: hosts, or ``*.example.com`` for all subdomains; empty for any.
        local_root: directory whose files may be read, with symbolic links resolved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    allow_private: bool = Field(
        False,
        description="fetch from private, loopback and link-local addresses too; for labs and tests",
    )
    timeout_s: Positive = Field(
        30.0, description="how long a fetch may take, redirects and retries included"
    )
    max_mb: Positive = Field(
        256.0, description="largest encoded medium, decompressed if it is sent compressed"
    )
    max_pixels: int = Field(8192 * 8192, ge=1, description="most pixels of an image or video frame")
    max_per_request: int = Field(256, ge=1, description="most media of one request")
    max_request_mb: Positive = Field(
        512.0, description="most encoded media of one request together"
    )
    max_request_megapixels: Positive = Field(
        1000.0,
        description="most pixels that are decoded for one request; a sample of sound counts as "
        "5 to 11, for each channel",
    )
    held_mb: Positive = Field(
        2048.0,
        description="most encoded media held for all requests together; what finds no "
        "room is answered with 429",
    )
    decoding_megapixels: Positive = Field(
        2000.0,
        description="most pixels decoded and held for all requests together, each of up to four "
        "bytes, and half as much for copies; what finds no room is answered with 429",
    )
    max_processor_mb: Positive = Field(
        6144.0,
        description="most memory of the model's processor for one medium, which may enlarge it",
    )
    decode_timeout_s: Positive = Field(
        120.0,
        description="how long one call may keep a thread, or a batch of media a process of "
        "--preprocess-workers, before it is replaced and the request fails; a quarter of a second "
        "more for each megapixel",
    )
    allowed_domains: tuple[str, ...] = ()
    local_root: Path | None = None
    rules: tuple[MediaRule, ...] = ()

    @field_validator("allowed_domains")
    @classmethod
    def _canonical_domains(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_canonical_domain(domain) for domain in domains)

    @field_validator("local_root")
    @classmethod
    def _existing_root(cls, root: Path | None) -> Path | None:
        if root is None:
            return None
        if not root.is_dir():
            raise ValueError(f"{root} is not a directory")
        return root.resolve()

    @property
    def max_bytes(self) -> int:
        return int(self.max_mb * 2**20)

    @property
    def max_request_bytes(self) -> int:
        return int(min(self.max_request_mb, self.held_mb) * 2**20)

    @property
    def max_request_pixels(self) -> int:
        return int(min(self.max_request_megapixels, self.decoding_megapixels) * 1_000_000)

    @property
    def max_processor_bytes(self) -> int:
        return int(self.max_processor_mb * 2**20)

    @property
    def held_bytes(self) -> int:
        return int(self.held_mb * 2**20)

    @property
    def decoding_pixels(self) -> int:
        return int(self.decoding_megapixels * 1_000_000)

    @property
    def connect_timeout_s(self) -> float:
        """Time-out for connecting to one address, in seconds."""
        return min(5.0, self.timeout_s)

    def allows_address(self, address: str) -> bool:
        """Return whether to connect to an address. False unless its spelling is canonical."""
        parsed = parse_address(address)
        if parsed is None:
            return False
        return self.allow_private or (is_public(parsed) and not is_own(parsed))

    def check_url(self, url: URL) -> None:
        """Raise RefusedError for a forbidden http(s) URL, before its host is looked up."""
        if url.scheme not in ("http", "https"):
            raise RefusedError("only http, https and data URLs are fetched")
        host = (url.raw_host or "").lower().removesuffix(".")
        if url.port == 0:
            raise RefusedError("port 0 is none")
        address = parse_address(host)
        if address is None and (not _HOST.fullmatch(host) or _ENDS_IN_A_NUMBER.fullmatch(host)):
            raise RefusedError("its host is malformed")
        if self.allowed_domains and not any(
            _matches(host, domain) for domain in self.allowed_domains
        ):
            raise RefusedError("its host is not among the allowed domains")
        if address is not None and not self.allows_address(host):
            raise RefusedError("its address is not public")
        for rule in self.rules:
            rule.check(url)

    def redirect(self, url: URL, location: str) -> URL:
        """Return a redirect's target, or raise RefusedError if it may not be followed."""
        check_text(location)
        target = parse_url(_joined(url, location))
        self.check_url(target)
        if url.scheme == "https" and target.scheme == "http":
            raise RefusedError("it drops encryption")
        return target


def parse_url(text: str) -> URL:
    """Parse a URL that is not a data URL; http and https URLs go out as written. Raises
    RefusedError.

    Escapes stay as they are, since signatures cover them. Only unsendable characters are escaped,
    as browsers do: spaces, quotes, letters beyond ASCII. A host with such letters is in Punycode.
    """
    text = text.strip(" ")
    check_text(text)
    try:
        parsed = URL(text)
        return _as_written(parsed, text) if parsed.scheme in ("http", "https") else parsed
    except ValueError:
        # Not chained: the text may hold secrets, and yarl repeats it.
        raise RefusedError("its URL is malformed") from None


def check_text(text: str) -> None:
    """Raise RefusedError for text that is too long or has control characters."""
    if len(text) > MAX_URL_CHARACTERS:
        raise RefusedError(f"a URL of more than {MAX_URL_CHARACTERS} characters is not fetched")
    if _CONTROL.search(text):
        raise RefusedError("its URL has control characters")


def _as_written(parsed: URL, text: str) -> URL:
    """Return a URL with path and query as in its text. Raises ValueError if they are ambiguous."""
    found = _AFTER_AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError("no authority")
    written = URL.build(
        scheme=parsed.scheme,
        authority=parsed.raw_authority,
        path=quote(found["path"], safe=_SENT),
        query_string=quote(found["query"] or "", safe=_SENT),
        encoded=True,
    )
    # The checked host must be the host of the connection.
    if (written.raw_host, written.port) != (parsed.raw_host, parsed.port):
        raise ValueError("no one host")
    return written


def _joined(url: URL, location: str) -> str:
    try:
        return urljoin(str(url), location)
    except ValueError:
        raise RefusedError("its URL is malformed") from None


def _canonical_domain(domain: str) -> str:
    prefix, host = ("*.", domain[2:]) if domain.startswith("*.") else ("", domain)
    try:
        canonical = URL.build(scheme="http", host=host.strip("[]")).raw_host or ""
    except ValueError as error:
        raise ValueError(f"{domain!r} is not a host") from error
    canonical = canonical.lower().removesuffix(".")
    if parse_address(canonical) is None and not _HOST.fullmatch(canonical):
        raise ValueError(f"{domain!r} is not a host")
    return prefix + canonical


def _matches(host: str, domain: str) -> bool:
    if domain.startswith("*."):
        return host.endswith(domain[1:])
    return host == domain
