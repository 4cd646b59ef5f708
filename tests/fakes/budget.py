"""A budget of pixels that is never spent."""


def anything(pixels: int) -> None:
    """Admits it."""
