"""Admission control: limits on connections, bodies, requests in flight and open files."""
