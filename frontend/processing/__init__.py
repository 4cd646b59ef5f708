"""Media and text become a prompt: the renderer, the HF processor, and what is kept of both."""

from frontend.processing.media_processing import MOST_WAITING
from frontend.processing.preprocessor import MediaItem, Preprocessor, ProcessedPrompt

__all__ = [
    "MOST_WAITING",
    "MediaItem",
    "Preprocessor",
    "ProcessedPrompt",
]
