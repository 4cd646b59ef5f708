"""Admission control: limits on connections, heads, bodies, message parts and requests in flight."""
