"""Discovery in a directory: one file per incarnation of a worker, touched as long as it lives.

The embedded default, for one host or a shared file system. A card is written to a
temporary name and renamed, so a reader never sees half of one. Directory 0700, files
0600: a card decides which model a frontend loads, so nobody else may write one.

A lease is renewed by anything that changes about the file.
"""

from common.discovery.file.discovery import LEASE_S, CardDirectory, FileDiscovery
from common.discovery.file.publisher import FileCardPublisher

__all__ = [
    "LEASE_S",
    "CardDirectory",
    "FileCardPublisher",
    "FileDiscovery",
]
