"""Who asks: an API key and a cache salt, and what is kept apart for them."""

from frontend.tenancy.cache_salt import (
    current_partition,
    note_salt,
    salt_of_blocks,
    tenants_apart,
)
from frontend.tenancy.tenant import EVERYBODY, Tenant, current_tenant

__all__ = [
    "EVERYBODY",
    "Tenant",
    "current_partition",
    "current_tenant",
    "note_salt",
    "salt_of_blocks",
    "tenants_apart",
]
