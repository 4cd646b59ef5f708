"""Inspect encoded media before decoding, limit the decoders, and partition cached media."""
