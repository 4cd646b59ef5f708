"""``mmrouter up``: workers and frontends of this machine, started, watched and stopped together."""
