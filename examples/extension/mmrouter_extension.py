"""An example of what a package can add: a router mode and a rule on media.

After ``pip install ./examples/extension`` a frontend takes ``--router-mode fewest-requests``, and
fetches media by https only.
"""

from yarl import URL

from frontend.media_limits import MediaRule, RefusedError
from frontend.router.modes import Choice, RouterMode, Situation


class FewestRequests(RouterMode):
    """The worker with the fewest requests; of several the one where this costs least."""

    def choose(self, situation: Situation) -> Choice:
        fewest = min(load.active for load in situation.loads)
        free = [at for at, load in enumerate(situation.loads) if load.active == fewest]
        return Choice(free[situation.least([situation.costs[at] for at in free])])


class OnlyEncrypted(MediaRule):
    def check(self, url: URL) -> None:
        if url.scheme != "https":
            raise RefusedError("only https addresses are fetched here")
