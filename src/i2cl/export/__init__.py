"""Export a task as a text classifier, a checkpoint, a PEFT adapter or a GGUF file, and verify exports."""

from i2cl.export.checkpoint import export_hf
from i2cl.export.classifier import ClassifierVerification, export_classifier, is_classifier, verify_classifier
from i2cl.export.folding import fold
from i2cl.export.gguf import export_gguf
from i2cl.export.golden import Golden, make_golden
from i2cl.export.llama_cpp import verify_gguf
from i2cl.export.peft import export_peft
from i2cl.export.server import ask_server
from i2cl.export.verify import Verification, verify

__all__ = [
    "ClassifierVerification",
    "Golden",
    "Verification",
    "ask_server",
    "export_classifier",
    "export_gguf",
    "export_hf",
    "export_peft",
    "fold",
    "is_classifier",
    "make_golden",
    "verify",
    "verify_classifier",
    "verify_gguf",
]
