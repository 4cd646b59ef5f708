"""Fetch, check and decode media."""

from frontend.fetch.allowance import RequestAllowance, allow_media, current_allowance
from frontend.fetch.connector import CONNECTOR_NAME, for_user, register
from frontend.fetch.content import Content, DeferredMedium, arrived, decoding_mode, freeze
from frontend.fetch.decoded import processing_weight, seconds_to_process
from frontend.fetch.decoder_processes import fork_decoders
from frontend.fetch.decoders import MISLED_DECODER_ERRORS, decode, limit_decoders
from frontend.fetch.format_probe import FILM, PICTURE, SOUND, ProbedFormat, probe_formats
from frontend.fetch.loader import MediaLoader
from frontend.fetch.processor_memory import ProcessorMemory
from frontend.fetch.settings import MediaSettings
