"""How frontends learn which workers there are: cards under leases.

:mod:`.base` is the interface, :mod:`.settings` has the table of what implements it, :mod:`.file` is
the embedded default.
"""
