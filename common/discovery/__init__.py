"""Discovery: how frontends find workers, by cards under leases.

:mod:`.base` is the interface, :mod:`.settings` lists the backends, :mod:`.file` is the embedded
default.
"""
