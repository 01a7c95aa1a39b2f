"""Systems that were trained to turn a long prompt into a few vectors."""

from i2cl.methods.compressors.autocompressor import AutoCompressor

__all__ = ["AutoCompressor"]
