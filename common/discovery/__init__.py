"""How frontends learn which workers there are: cards under leases.

:mod:`.base` is the interface, :mod:`.urls` the table of what implements it, :mod:`.file` the
embedded default.
"""
