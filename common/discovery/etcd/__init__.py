"""Discovery in an etcd cluster: one key per incarnation of a worker, which goes with a lease.

For fleets of several hosts. Whoever may write below the prefix decides which workers frontends
connect to, so strangers need to be kept out by etcd's own users, or by a fleet key.
"""

from common.discovery.etcd.discovery import EtcdDiscovery

__all__ = ["EtcdDiscovery"]
