"""Workers of this frontend: membership, the link to each, and the media sent over it."""

from frontend.workers.adapters import Adapters
from frontend.workers.contract import Contract, Refusals, tell_refused
from frontend.workers.dispatch import Answer
from frontend.workers.fleet import Fleet
from frontend.workers.fleets import Fleets, follow
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Departure, Departures, Member, Members, Roll
from frontend.workers.operations import Performed, WorkerPage, ask_for_pages, perform, those_called
from frontend.workers.partial_decode import Logprobs
