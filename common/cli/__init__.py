"""Command lines: flags declared once, ``--config``, help, and what a shell completes."""
