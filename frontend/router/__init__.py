"""Choose the worker on which a request costs least."""

from frontend.router.decision import Decision, MediaMove
from frontend.router.events import ZmqFeeds
from frontend.router.hashing import LoraKey, MediaSpan, PromptEmbeds
from frontend.router.index import Knowledge
from frontend.router.inputs import EventSource, MediaNeed, RoutableWorker, RoutingRequest
from frontend.router.router import Router
from frontend.router.selection import Slots, TargetLoad
from frontend.router.settings import RouterSettings
