"""Stands in for soundfile, which only sounds need."""


class SoundFileError(Exception):
    pass


class LibsndfileError(SoundFileError):
    pass


class SoundFile:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise SoundFileError("the kit has no soundfile: sounds can't be decoded")


def available_formats() -> dict[str, str]:
    return {"WAV": "WAV (Microsoft)", "MP3": "MPEG-1/2 Audio", "OGG": "OGG", "FLAC": "FLAC"}
