"""Systems that were trained to turn a long prompt into a few vectors."""

from i2cl.methods.compressors.autocompressor import AutoCompressor
from i2cl.methods.compressors.cepe import CEPE
from i2cl.methods.compressors.icae import ICAE

__all__ = ["CEPE", "ICAE", "AutoCompressor"]
