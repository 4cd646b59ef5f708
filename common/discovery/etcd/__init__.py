"""Discovery in an etcd cluster: one key per incarnation of a worker, under a lease.

For fleets of several hosts. Write access below the prefix decides which workers frontends connect
to: restrict it by etcd's users, or use a fleet key.
"""

from common.discovery.etcd.discovery import EtcdDiscovery
