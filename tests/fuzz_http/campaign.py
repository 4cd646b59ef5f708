"""Send hostile requests one after the other, watch what each does, and keep what must not be."""

import http.client
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tests.fuzz_http.canaries import MARK, Canaries, Touch
from tests.fuzz_http.fleet import Fleet
from tests.fuzz_http.requests import Request, encoded

ANSWER_S: Final = 60.0
STALL_S: Final = 0.3
GROWTH_MB: Final = 256.0
SHRINKING: Final = 40
"""Requests that are sent to find a smaller one that does the same."""

LONG: Final = 100
"""Characters of a text, its quotes included, that may be remembered and gets another ending."""

_TEXT: Final = re.compile(r'"(?:[^"\\]|\\.)*+"')

AN_ANSWER: Final = 501
"""The one 5xx that is an answer: what a fleet does not do."""

_ERRORS_IN_STREAMS: Final = (b'"code": 500', b'"code":500', b'"type":"api_error"')
MEDIA: Final = ("url", "image_url", "video_url", "audio_url", "image", "file_url")
"""Fields whose hosts the media fetcher may look up, under its policy."""


class Figures(msgspec.Struct):
    """What ``make fuzz-http`` ends with.

    Attributes:
        requests: sent, by their statuses; 0 where no answer came within a minute.
        loop_stall_s_max: longest time for which one request gave others no turn of the event loop;
            ``watched_frontend.py`` says how it is measured.
        rss_growth_mb_max: MiB that the frontend had more during one request.
        rss_kept_mb: MiB that it has more after requests that it had before.
        died: frontends and workers that ended.
        http_500: answers of 500 and more but for 501, and errors in streams that say so.
        others_failed: requests of a user that were not answered as at first.
        sockets_unexpected, files_unexpected: requests that reached out to something.
    """

    seed: int
    requests: int = 0
    statuses: dict[str, int] = {}
    loop_stall_s_max: float = 0.0
    rss_growth_mb_max: float = 0.0
    rss_kept_mb: float = 0.0
    died: int = 0
    http_500: int = 0
    others_asked: int = 0
    others_failed: int = 0
    others_slowest_s: float = 0.0
    unanswered: int = 0
    sockets_unexpected: int = 0
    files_unexpected: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one request did."""

    status: int
    said: bytes = b""
    stall_s: float = 0.0
    growth_mb: float = 0.0
    touched: tuple[Touch, ...] = ()
    dead: str = ""

    @property
    def wrong(self) -> str:
        """What must not be, by its name among the figures; empty if all is well."""
        if self.dead:
            return "died"
        if self.status >= 500 and self.status != AN_ANSWER:
            return "http_500"
        if self.status == 200 and any(mark in self.said for mark in _ERRORS_IN_STREAMS):
            return "http_500"
        if any(touch.is_network for touch in self.touched):
            return "sockets_unexpected"
        if self.touched:
            return "files_unexpected"
        if self.stall_s > STALL_S:
            return "loop_stall_s_max"
        if self.growth_mb > GROWTH_MB:
            return "rss_growth_mb_max"
        return ""

    @property
    def figures(self) -> str:
        """For a line of the report."""
        touched = "".join(f" [{each.call} {each.about[:300]}]" for each in self.touched)
        return (
            f"status {self.status}, loop {self.stall_s:.2f} s, +{self.growth_mb:.0f} MiB"
            f"{', dead: ' + self.dead if self.dead else ''}{touched}"
        )


@dataclass
class Campaign:
    """One fleet under fire.

    Attributes:
        again: how often a request that stalled the loop, or took memory, is sent again: the
            smallest figure counts.
    """

    fleet: Fleet
    canaries: Canaries
    figures: Figures
    again: int = 2

    def send(self, request: Request) -> Outcome:
        """Send a request, again if a figure of time or memory is beyond what it may be."""
        outcome = self._once(request)
        for number in range(self.again):
            if outcome.wrong not in ("loop_stall_s_max", "rss_growth_mb_max"):
                break
            again = self._once(request, str(number))
            outcome = Outcome(
                again.status,
                again.said,
                min(outcome.stall_s, again.stall_s),
                min(outcome.growth_mb, again.growth_mb),
                again.touched,
                again.dead,
            )
        return outcome

    def take(self, request: Request) -> Outcome:
        """Send a request, and add what it did to the figures."""
        outcome = self.send(request)
        figures = self.figures
        figures.requests += 1
        status = str(outcome.status)
        figures.statuses[status] = figures.statuses.get(status, 0) + 1
        figures.unanswered += not outcome.status and not outcome.dead
        figures.loop_stall_s_max = round(max(figures.loop_stall_s_max, outcome.stall_s), 3)
        figures.rss_growth_mb_max = round(max(figures.rss_growth_mb_max, outcome.growth_mb), 1)
        figures.died += bool(outcome.dead)
        figures.http_500 += outcome.wrong == "http_500"
        figures.sockets_unexpected += any(each.is_network for each in outcome.touched)
        figures.files_unexpected += any(not each.is_network for each in outcome.touched)
        return outcome

    def shrink(self, request: Request, outcome: Outcome) -> tuple[Request, Outcome]:
        """Return the smallest request found that does the same; what ends a process is not tried
        again.
        """
        tries = 0
        while outcome.wrong != "died":
            for smaller in request.smaller():
                if (tries := tries + 1) > SHRINKING:
                    return request, outcome
                found = self.send(smaller)
                if found.wrong == outcome.wrong:
                    request, outcome = smaller, found
                    break
            else:
                break
        return request, outcome

    def _once(self, request: Request, ending: str = "") -> Outcome:
        """``ending``: of the longest text, so that nothing that is remembered answers."""
        fleet = self.fleet
        text = self.canaries.fill(request.text)
        if ending:
            text = _ending_with(ending, text)
        status, said = 0, b""
        try:
            fleet.stall_s()
            fleet.forget_peak()
            before = fleet.resident_mb()
            status, said = self.ask(request.path, encoded(text))
            stall, growth = fleet.stall_s(), fleet.peak_mb() - before
        except (OSError, ValueError) as error:
            if not (dead := fleet.dead()):
                raise
            return Outcome(status, said or repr(error).encode(), dead=dead)
        touched = [
            each
            for each in self.canaries.touched()
            if not by_policy(request.ways, each) and not of_a_template(request.ways, each)
        ]
        return Outcome(status, said, stall, growth, tuple(touched), fleet.dead())

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return 0 where no answer comes."""
        where = urlsplit(self.fleet.frontend.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            connection.close()


def names_media(ways: Iterable[str]) -> bool:
    """Whether a field is hostile that has the address of a medium.

    Args:
        ways: of a request.
    """
    return any(f".{name}" in way.partition(" = ")[0] for way in ways for name in MEDIA)


def by_policy(ways: Iterable[str], touch: Touch) -> bool:
    """Whether a name of a server of media was looked up, as it is before it is judged."""
    lookup = touch.call in ("getaddrinfo", "socket.getaddrinfo")
    named = re.search(rf"{MARK}\d+\.invalid", touch.about) is not None
    return lookup and named and names_media(ways)


def _ending_with(ending: str, text: str) -> str:
    """Return JSON whose longest text ends otherwise, if that is long."""
    longest = max(_TEXT.finditer(text), key=lambda each: len(each[0]))
    if len(longest[0]) <= LONG:
        return text
    at = longest.end() - 1
    return text[:at] + ending + text[at:]


def of_a_template(ways: Iterable[str], touch: Touch) -> bool:
    """Whether a template of a client's was compiled, in Jinja's sandbox, where one may be sent."""
    return touch.call == "compile" and "chat_template" in re.findall(r"\w+", " ".join(ways))
