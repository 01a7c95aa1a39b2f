"""Refuse an export before the base model is loaded, where the artefact shows the reason."""

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from i2cl.core.injection import Injection
from i2cl.errors import require_packages
from i2cl.export.classifier import empty_classifier
from i2cl.export.folding import (
    FoldedStructure,
    multimodal_refusal,
    require_foldable,
    require_single_label,
)
from i2cl.export.gguf import require_llama
from i2cl.export.peft import adapted_outputs
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.fingerprint import ModelIdentity


def require_holdable(injection: Injection, form: str) -> None:
    """Check that a format can hold a task on its base model, whose config is in the artefact.

    The export repeats these checks. It alone checks label tokens, label priors and tokenizers.

    Args:
        injection: fitted task.
        form: format of the export (`i2cl.export.EXPORTERS`).

    Raises:
        I2CLError: if it cannot, or a package is not installed.
    """
    if form == "gguf":
        require_packages("GGUF", "gguf", "gguf")
    if form != "classifier":
        require_single_label(injection)
    require_foldable(injection)
    config = _config(injection.base)
    if config is None:
        return
    if form == "peft":
        adapted_outputs(config, injection)
        return
    structure = FoldedStructure(config, injection, label_scores=form != "classifier")
    if form == "classifier":
        empty_classifier(structure, len(injection.task.labels))
    elif form == "gguf":
        require_llama(structure.config, config.model_type)


def _config(base: ModelIdentity) -> PreTrainedConfig | None:
    """Return the config of a base model; None for an unknown type, and if the fields are another version's.

    Raises I2CLError for a part of a multimodal model.
    """
    fields = dict(base.config)
    kind = fields.pop("model_type", base.model_type)
    if kind != base.model_type:
        raise multimodal_refusal(base.model_type)
    if kind not in ARCHITECTURES:
        return None
    try:
        # the artefact leaves out token ids, and the default padding token may be beyond a small vocabulary
        return AutoConfig.for_model(kind, **fields | {"pad_token_id": 0})
    except (StrictDataclassError, TypeError, ValueError, KeyError):
        return None
