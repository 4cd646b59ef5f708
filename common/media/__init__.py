"""Inspect encoded media before decoding, and limit the decoders."""
