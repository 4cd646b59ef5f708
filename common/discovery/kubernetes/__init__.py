"""Discovery by an API server of Kubernetes: one Lease object per incarnation of a worker.

For fleets in a cluster. Whoever may write Leases in the namespace decides which workers frontends
connect to, so strangers need to be kept out by roles, or by a fleet key.
"""

from common.discovery.kubernetes.discovery import KubernetesDiscovery

__all__ = ["KubernetesDiscovery"]
