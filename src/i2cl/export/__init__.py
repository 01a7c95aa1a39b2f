"""A calibrated injection as a checkpoint, a PEFT adapter or a GGUF file, and the check of what runs them."""

from i2cl.export.checkpoint import export_hf
from i2cl.export.folding import fold
from i2cl.export.gguf import export_gguf
from i2cl.export.golden import Golden, make_golden
from i2cl.export.llama_cpp import verify_gguf
from i2cl.export.peft import export_peft
from i2cl.export.server import ask_server
from i2cl.export.verify import Verification, verify

__all__ = [
    "Golden",
    "Verification",
    "ask_server",
    "export_gguf",
    "export_hf",
    "export_peft",
    "fold",
    "make_golden",
    "verify",
    "verify_gguf",
]
