"""Who asks: an API key and a cache salt, and what is kept apart for them."""

from frontend.tenancy.cache_salt import (
    current_partition,
    salt_of_blocks,
    take_salts_from_bodies,
    tenants_apart,
)
from frontend.tenancy.tenant import EVERYBODY, Tenant, current_tenant

__all__ = [
    "EVERYBODY",
    "Tenant",
    "current_partition",
    "current_tenant",
    "salt_of_blocks",
    "take_salts_from_bodies",
    "tenants_apart",
]
