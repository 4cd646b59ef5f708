"""Load media: from a reference in a request to a decoded medium.

The only way in: every modality and source passes the policy, the cache, the budgets and the limits
on decoding here.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from vllm import envs
from vllm.multimodal.media import ImageMediaIO, MediaIO, VideoMediaIO
from yarl import URL

from common.aio.cleanup import undo_on_error
from common.aio.watched_threads import WatchedThreads
from common.errors import OverloadedError
from common.media.cache_partition import SHARED, Partition
from common.media.formats import is_web_page
from common.media.picture_strips import LARGE
from common.observability.telemetry import MEDIA_DECODES, MEDIA_FETCHED_BYTES, MEDIA_FETCHES, stage
from common.observability.watchdog import allow
from frontend.client_turns import ClientTurns
from frontend.fetch.allowance import HeldBytes, RequestAllowance, current_allowance
from frontend.fetch.cache import EntityTags, MediaCache
from frontend.fetch.content import Content, Digest, decoding_mode
from frontend.fetch.data_url import has_scheme, is_data_url, read_data_url
from frontend.fetch.decoded import holder, own_copy, processing_weight
from frontend.fetch.decoder_processes import DecoderProcesses, is_everyday
from frontend.fetch.decoders import PIXEL_BYTES, SpeechIO, decode
from frontend.fetch.http import HttpFetcher, Unchanged
from frontend.fetch.local_file import read_local_file
from frontend.fetch.single_flight import SingleFlight
from frontend.media_limits import (
    COPIES_WAIT_S,
    Copies,
    FetchPolicy,
    MediaBudgets,
    MediaError,
    RefusedError,
    RequestLimitError,
    Reservation,
    UnfetchableError,
    parse_url,
    seconds_for,
)
from frontend.request_context import current_partition

T = TypeVar("T")

_COPIES: Final = 3
"""Memory of decoders and conversions beside a picture, as a multiple, at most: WebP, progressive
JPEG in CMYK and transparent pictures take 12 or 13 bytes a pixel, the rest 8 to 10."""

_FRAMES: Final = 25
"""The same for a frame of a film: its codec keeps 17, of up to six bytes a pixel."""


class MediaLoader:
    """Loads media for all requests of a frontend. Belongs to the event loop that it is made on.

    Attributes:
        defers: whether vLLM gets media still encoded, for a processor that decodes.
        budgets: shared by all requests.
        pool: threads for blocking fetches and for decoding.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        cache_bytes: int,
        *,
        http: HttpFetcher | None = None,
        pool: Executor | None = None,
        processes: DecoderProcesses | None = None,
    ) -> None:
        """The other parts are made here unless given; the pool has as many threads as vLLM's. A
        cache of 0 bytes keeps nothing. ``processes`` decode all but everyday pictures; without,
        threads do.
        """
        self.policy = policy
        self._processes = processes
        self.defers = False
        self.budgets = MediaBudgets.of(policy)
        self._http = HttpFetcher(policy) if http is None else http
        self._own_pool = WatchedThreads(
            "media", envs.VLLM_MEDIA_LOADING_THREAD_COUNT, policy.decode_timeout_s
        )
        self.pool = pool or self._own_pool
        self._turns = _half(envs.VLLM_MEDIA_LOADING_THREAD_COUNT)
        self._turns_at_speech = _half(envs.VLLM_MAX_AUDIO_PREPROCESS_WORKERS)
        self._cache = MediaCache(cache_bytes)
        self._tags = EntityTags(self._cache)
        own = (RequestLimitError,)
        self._fetches: SingleFlight[Content] = SingleFlight(not_shared=own)
        self._decodes: SingleFlight[tuple[Any, bool]] = SingleFlight(not_shared=own)

    async def load(self, url: str, media_io: MediaIO[Any]) -> Any:
        """Fetch and decode a medium, which is then the caller's alone.

        Concurrent requests of a partition share one fetch of a URL, and one decoding of the same
        bytes. The last cancellation leaves nothing behind; a decoding thread finishes unobserved.

        Raises:
            MediaError: it is unavailable; 400 or 422.
            ValueError: it can't be decoded; 400.
            OverloadedError: no room for it now; 429.
            ThreadStuckError: a thread did not return from it; 422.
        """
        return await self.decode(await self._fetched(url, media_io), media_io)

    async def fetch(self, url: str, media_io: MediaIO[Any]) -> Content:
        """Fetch a medium and leave it encoded. Raises MediaError (400 or 422), OverloadedError
        (429).
        """
        content = await self._fetched(url, media_io)
        self._cache.keep(content)
        return content

    async def decode(self, content: Content, media_io: MediaIO[Any]) -> Any:
        """Decode a medium, which is then the caller's alone. Raises as :meth:`load`."""
        mode = decoding_mode(media_io)
        if mode is None or self._cache.get(content.digest, mode) is not None:
            return await self.decode_once(content, media_io)
        allowance = current_allowance(self.policy)

        async def decode_and_keep() -> tuple[Any, bool]:
            decoded, reservation = await self.aside(
                partial(self._decode, content, media_io, allowance)
            )
            kept = self._cache.add(content, mode, decoded)
            if kept:
                reservation.release()  # the cache has a budget of its own
            return decoded, kept

        key = (content.digest, mode)
        MEDIA_DECODES.labels("shared" if key in self._decodes else "decoded").inc()
        async with allowance.decodes:
            (decoded, kept), shared = await self._decodes.run(key, decode_and_keep)
        if kept or shared:
            decoded = await self._in_pool(self._copy, decoded)
        return decoded

    async def decode_once(
        self, content: Content, media_io: MediaIO[Any], begin: Callable[[], object] = bool
    ) -> Any:
        """Decode a medium whose pixels are not kept, since tensors are. ``begin`` is called first,
        in the thread, and may raise. Raises as :meth:`load`.
        """
        mode = decoding_mode(media_io)
        cached = None if mode is None else self._cache.get(content.digest, mode)
        MEDIA_DECODES.labels("decoded" if cached is None else "cached").inc()
        if cached is not None:
            return await self._in_pool(self._copy, cached)
        allowance = current_allowance(self.policy)

        def work() -> tuple[Any, Reservation]:
            begin()
            return self._decode(content, media_io, allowance)

        async with allowance.decodes:
            decoded, _ = await self.aside(work)
        return decoded

    async def aside(self, work: Callable[[], T]) -> T:
        """Run a function in a thread for decoding, in the turns of its client."""
        return await self._turns.run(self.pool, work)

    async def decode_speech(
        self, data: bytes, load: Callable[[bytes, int], Any], threads: Executor
    ) -> Any:
        """Decode a sound by ``load`` of :class:`SpeechIO` in one of ``threads``. It counts like
        other media until it is garbage collected. Raises as :meth:`load`.
        """
        content, media_io = Content(data, Digest(b"")), SpeechIO(load)
        decode = partial(self._decode, content, media_io, current_allowance(self.policy))
        decoded, _ = await self._turns_at_speech.run(threads, decode)
        return decoded

    def expect_no_media(self) -> None:
        """Free the memory that decoding needs, until a medium comes. Blocks."""
        if self._processes is not None:
            self._processes.rest()

    async def close(self) -> None:
        """Cancel current work, close connections, end the threads, drop the cache."""
        await self._fetches.close()
        await self._decodes.close()
        await self._http.close()
        if self._processes is not None:  # threads wait for them
            await asyncio.to_thread(self._processes.close)
        await asyncio.to_thread(self._own_pool.shutdown, cancel_futures=True)
        self._cache.clear()

    def _decode(
        self, content: Content, media_io: MediaIO[Any], allowance: RequestAllowance
    ) -> tuple[Any, Reservation]:
        """Return a decoded medium, and its reservation. Blocks."""
        budget = self.budgets.decoding
        with budget.reserve(client=allowance.client) as reservation, ExitStack() as copies:

            def admit(pixels: int) -> None:
                allowance.take_pixels(pixels)
                reservation.grow(pixels)
                allow(seconds_for(pixels))
                if isinstance(media_io, ImageMediaIO):
                    share(self.budgets.copies, _COPIES * pixels, pixels)

            def admit_frame(pixels: int) -> None:
                share(self.budgets.codecs, _FRAMES * pixels, pixels)

            def share(budget: Copies, amount: int, pixels: int) -> None:
                if pixels > LARGE:
                    allow(COPIES_WAIT_S)
                    copies.enter_context(budget.share(amount))

            if self._processes is None or is_everyday(content, media_io):
                decoded = decode(content, media_io, self.policy, admit, admit_frame)
            else:
                decoded = self._processes.decode(content, media_io, admit, admit_frame)
            return decoded, reservation.moved_to(holder(decoded))

    def _copy(self, decoded: Any) -> Any:
        pixels = -(-processing_weight(decoded) // PIXEL_BYTES)
        allow(seconds_for(pixels))
        with self.budgets.decoding.reserve(pixels) as reservation:
            copy = own_copy(decoded)
            reservation.moved_to(holder(copy))
            return copy

    async def _fetched(self, url: str, media_io: MediaIO[Any]) -> Content:
        max_bytes = min(self.policy.max_bytes, media_io.get_max_bytes() or self.policy.max_bytes)
        with stage("fetch"):
            return await self._content(url, max_bytes, isinstance(media_io, VideoMediaIO))

    async def _content(self, url: str, max_bytes: int, video: bool) -> Content:
        partition = current_partition()
        allowance = current_allowance(self.policy)
        held = HeldBytes(allowance, self.budgets.held)
        if is_data_url(url):
            with _counted("data"):
                held.grow(min(len(url) * 3 // 4, max_bytes))
                read = partial(read_data_url, url, max_bytes, jpeg_frames=video)
                return await self._in_pool(_keeping, held, read, partition)
        if url[:5].lower() == "file:":
            with _counted("file"):
                root = self.policy.local_root
                read = partial(read_local_file, parse_url(url), root, max_bytes, held)
                return await self._in_pool(_keeping, held, read, partition)
        if not has_scheme(url):
            with _counted("http"):
                raise RefusedError(
                    "it is no URL; send an http(s) URL, or the data as data:<type>;base64,<data>"
                )
        key = (partition, url, max_bytes)
        own = False

        def start() -> Coroutine[None, None, Content]:
            nonlocal own
            own = True
            return self._fetch(url, max_bytes, held, partition)

        # Not inside the fetch: a request that joins it must not wait for another request's slots.
        async with allowance.fetches:
            if allowance.failure is not None:
                raise allowance.failure()
            if key in self._fetches:
                MEDIA_FETCHES.labels("http", "shared").inc()
            content, _ = await self._fetches.run(key, start)
        if not own:
            allowance.take_bytes(len(content.data))
        return content

    async def _fetch(
        self, url: str, max_bytes: int, held: HeldBytes, partition: Partition
    ) -> Content:
        at_hand: dict[URL, Content] = {}  # even if the cache evicts it meanwhile

        def known_etag(hop: URL) -> str | None:
            known = self._tags.recall(hop, partition)
            if known is None or len(known[1].data) > max_bytes:
                return None
            at_hand[hop] = known[1]
            return known[0]

        with _counted("http") as outcome:
            answer = await self._http.fetch(url, max_bytes, known_etag, held)
            if isinstance(answer, Unchanged):
                outcome.name = "unchanged"
                return _keeping(held, partial(replace, at_hand[answer.url]))
            joined = partial(Content.joined, answer.chunks)
            content = await self._in_pool(_keeping, held, joined, partition)
            if is_web_page(content.data):
                raise UnfetchableError("the address gave a web page (HTML)", "status")
        MEDIA_FETCHED_BYTES.inc(len(content.data))
        if answer.etag is not None:
            self._tags.remember(answer.url, answer.etag, content, partition)
        return content

    async def _in_pool(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *args)


def _half(threads: int) -> ClientTurns:
    """A client has half of the threads: films keep them for a minute, and others need them to read
    a data URL.
    """
    return ClientTurns(max(1, threads // 2))


def _keeping(
    held: HeldBytes, make: Callable[[], Content], partition: Partition = SHARED
) -> Content:
    """Make a content and hold room for its bytes as long as it lives. With ``partition``, move a
    new one into it; cached ones are in theirs.
    """
    with undo_on_error(held.drop):
        content = make().within(partition)
        held.grow_to(len(content.data))
    held.keep_with(content)
    return content


@dataclass
class _Outcome:
    name: str = "fetched"


@contextmanager
def _counted(source: str) -> Iterator[_Outcome]:
    outcome = _Outcome()
    try:
        yield outcome
    except asyncio.CancelledError:
        outcome.name = "cancelled"
        raise
    except MediaError as error:
        outcome.name = error.outcome
        raise
    except OverloadedError:
        outcome.name = "overloaded"
        raise
    except ValueError:
        outcome.name = "refused"
        raise
    finally:
        MEDIA_FETCHES.labels(source, outcome.name).inc()
