"""Makes an archive with what a machine that has PyTorch and no network lacks."""
