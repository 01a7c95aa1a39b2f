"""Export a task as a text classifier, a language model, a PEFT adapter or a GGUF file, and verify exports.

Exports hold the LLM alone: the text experts of an ensemble are left out (`i2cl.Injection.llm_alone`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from i2cl.export.causal_lm import export_causal_lm
from i2cl.export.classifier import export_classifier
from i2cl.export.folding import fold
from i2cl.export.gguf import export_gguf
from i2cl.export.golden import Golden, Verification, make_golden
from i2cl.export.peft import export_peft
from i2cl.export.precheck import require_holdable
from i2cl.export.servers import verify_gguf, verify_server
from i2cl.export.verify import verify

EXPORTERS: Mapping[str, Callable[..., list[str] | None]] = MappingProxyType(
    {
        "classifier": export_classifier,
        "causal-lm": export_causal_lm,
        "peft": export_peft,
        "gguf": export_gguf,
    }
)
"""Functions by format (`i2cl export --to`). They may return sentences on how to use the export."""

__all__ = [
    "EXPORTERS",
    "Golden",
    "Verification",
    "export_causal_lm",
    "export_classifier",
    "export_gguf",
    "export_peft",
    "fold",
    "make_golden",
    "require_holdable",
    "verify",
    "verify_gguf",
    "verify_server",
]
