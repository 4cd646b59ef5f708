"""Turn media and text into a prompt: renderer, HF processor, and their caches."""

from frontend.processing.errors import missing_package
from frontend.processing.preprocessor import MediaItem, Preprocessor, ProcessedPrompt
from frontend.processing.settings import ArenaSettings, PreprocessSettings
from frontend.processing.tokenizing import LONG, TextCut, Tokenizing, texts_in
