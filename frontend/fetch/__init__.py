"""Fetch, check and decode media."""

from frontend.fetch.allowance import RequestAllowance, allow_media, current_allowance
from frontend.fetch.connector import CONNECTOR_NAME, for_user, register
from frontend.fetch.content import Content, DeferredMedium, arrived, decoding_mode, freeze
from frontend.fetch.decoded import processing_weight, seconds_to_process
from frontend.fetch.decoders import MISLED_DECODER_ERRORS, decode, limit_decoders
from frontend.fetch.format_probe import FILM, PICTURE, SOUND, ProbedFormat, probe_formats
from frontend.fetch.loader import MediaLoader
from frontend.fetch.processor_memory import ProcessorMemory
from frontend.fetch.settings import MediaSettings

__all__ = [
    "CONNECTOR_NAME",
    "FILM",
    "MISLED_DECODER_ERRORS",
    "PICTURE",
    "SOUND",
    "Content",
    "DeferredMedium",
    "MediaLoader",
    "MediaSettings",
    "ProbedFormat",
    "ProcessorMemory",
    "RequestAllowance",
    "allow_media",
    "arrived",
    "current_allowance",
    "decode",
    "decoding_mode",
    "for_user",
    "freeze",
    "limit_decoders",
    "probe_formats",
    "processing_weight",
    "register",
    "seconds_to_process",
]
