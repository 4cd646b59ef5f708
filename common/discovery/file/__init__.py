"""Discovery in a directory: one file per incarnation of a worker, touched while it lives.

The embedded default, for one host or a shared file system. A card is written to a temporary name
and renamed, so that a reader never sees a partial one. Directory 0700, files 0600: a card decides
which model a frontend loads, so no other user may write one. Any change of the file's metadata
renews its lease.
"""

from common.discovery.file.discovery import LEASE_S, CardDirectory, FileCardPublisher, FileDiscovery
