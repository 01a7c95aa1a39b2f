"""A calibrated injection as a plain checkpoint or a PEFT adapter, and the check that these run right."""

from i2cl.export.checkpoint import export_hf
from i2cl.export.folding import fold
from i2cl.export.golden import Golden, make_golden
from i2cl.export.peft import export_peft
from i2cl.export.server import ask_server
from i2cl.export.verify import Verification, verify

__all__ = [
    "Golden",
    "Verification",
    "ask_server",
    "export_hf",
    "export_peft",
    "fold",
    "make_golden",
    "verify",
]
