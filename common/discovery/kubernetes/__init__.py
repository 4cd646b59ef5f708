"""Discovery by the Kubernetes API server: one Lease object per incarnation of a worker.

For fleets in a cluster. Write access to Leases of the namespace decides which workers frontends
connect to: restrict it by roles, or use a fleet key.
"""

from common.discovery.kubernetes.discovery import KubernetesDiscovery
