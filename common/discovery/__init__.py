"""How frontends learn which workers there are: cards under leases.

:mod:`.base` is the interface, :mod:`.file` the embedded default.
"""
