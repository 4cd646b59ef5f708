"""The workers of this frontend: who is there, the link to each, and the media sent over it."""

from frontend.workers.adapters import Adapters
from frontend.workers.dispatch import Answer
from frontend.workers.figures import WorkerPage, WorkerPages
from frontend.workers.fleet import Fleet
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from frontend.workers.members import Member, Members
from frontend.workers.operations import Performed, perform, those_called

__all__ = [
    "Adapters",
    "Answer",
    "Fleet",
    "MediaSender",
    "Member",
    "Members",
    "Performed",
    "WorkerLink",
    "WorkerPage",
    "WorkerPages",
    "perform",
    "those_called",
]
