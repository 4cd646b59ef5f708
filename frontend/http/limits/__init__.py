"""What connections, bodies and requests may take."""
