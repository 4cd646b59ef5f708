"""``mmrouter up``: start, watch and stop workers and frontends of this machine together."""
