"""Command lines: flags declared once, ``--config``, help, and shell completion."""

import importlib.util
import sys

# Every command imports this first. pip's --no-deps and a copied folder lack dependencies.
if _missing := [
    name
    for name in ("annotated_types", "msgspec", "prometheus_client", "pydantic", "yaml", "zmq")
    if importlib.util.find_spec(name) is None
]:
    sys.exit(
        f"error: mmrouter is here without packages that it needs ({', '.join(_missing)}): "
        "`pip check` lists them; install them, or mmrouter again without --no-deps"
    )
