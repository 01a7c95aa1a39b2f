"""Evaluate injections with EleutherAI's lm-evaluation-harness, as its model type ``i2cl``.

The harness does not discover models of other packages, so ``python -m i2cl.interfaces.harness`` runs its
command line with this one registered (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/interface.md).
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, require_packages
from i2cl.models.decoder import Decoder
from i2cl.models.edits import AffineEdit, edit_outputs
from i2cl.models.loading import is_gguf, resolve_name

try:
    require_packages("the harness", "harness", "lm_eval")
except I2CLError as error:
    if __name__ != "__main__":
        raise
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

NAME = "i2cl"  # for ``--model``


@register_model(NAME)
class I2CLHarness(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """The harness's Hugging Face model with an injection at every token.

    This gives the same results as an exported checkpoint with ``--model hf`` (docs/guide/export.md), and as
    `Injection.log_probs` with ``scoring="sequence"``. Log-likelihoods of continuations are divided by the
    injection's temperature. That does not change accuracy; metrics such as ``brier_score`` use the calibrated
    probabilities. Perplexities of texts are not divided.

    Args:
        injection: an `Injection`, or its folder or hub id; None evaluates the base model.
        pretrained: name, folder or ``"reference"``; or a `Decoder`. Default: the injection's base model.
        force: accept another model of the same shape.
        revision: hub revision of the model. Default: the injection's.
        options: further arguments of the harness's ``HFLM``, such as batch_size, dtype, device, parallelize
            or add_bos_token.

    Raises:
        I2CLError: on an injection at some positions only, with word-level scoring, with a label prior, with a
            sentence encoder, or of another model.
    """

    def __init__(
        self,
        injection: str | Path | Injection | None = None,
        pretrained: str | Path | Decoder | None = None,
        *,
        force: bool = False,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        chosen = Injection.from_pretrained(injection) if isinstance(injection, str | Path) else injection
        if pretrained is None and chosen is None:
            raise I2CLError("neither a model nor an injection is named: give --model_args injection=FOLDER")
        if chosen is not None:
            _require_supported(chosen)
        if pretrained is None and chosen is not None:
            pretrained, revision = chosen.base.name, revision or chosen.base.revision
        if isinstance(pretrained, str | Path) and is_gguf(Path(resolve_name(str(pretrained)))):
            loading = {key: options.pop(key, None) for key in ("dtype", "device")}
            pretrained = Decoder.from_pretrained(str(pretrained), revision=revision, **loading)
        if isinstance(pretrained, Decoder):
            self._decoder = pretrained
            with pretrained.frozen():
                super().__init__(pretrained.model, tokenizer=pretrained.tokenizer, **options)
        else:
            source = resolve_name(str(pretrained))
            defaults: dict[str, Any] = {"use_safetensors": True, "revision": revision or "main"}
            if not torch.accelerator.is_available():
                defaults["device"] = "cpu"  # HFLM's default is CUDA
            super().__init__(source, **defaults | options)
            self._decoder = Decoder(self.model, self._plain_tokenizer, name=str(pretrained))
        self._temperature = 1.0 if chosen is None else chosen.temperature
        self._edits: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        if chosen is not None:
            chosen.require_base(self._decoder, force=force)
            edit = chosen.affine_edit()
            modules = self._decoder.hook_points(edit.hook_point)
            self._edits = [(module, _edit_all_tokens(edit, layer, index)) for layer, index, module in modules]

    def _create_tokenizer(self, *arguments: Any, **options: Any) -> None:
        """Copy the tokenizer, since the harness adds a padding token to it."""
        super()._create_tokenizer(*arguments, **options)
        self._plain_tokenizer: Any = self.tokenizer
        self.tokenizer: Any = copy.deepcopy(self.tokenizer)

    def loglikelihood(self, *arguments: Any, **options: Any) -> list[tuple[float, bool]]:
        """Return continuations' log-likelihoods, divided by the temperature, and whether each is greedy."""
        pairs = super().loglikelihood(*arguments, **options)
        return [(value / self._temperature, greedy) for value, greedy in pairs]

    def _model_call(self, *arguments: Any, **options: Any) -> Tensor:
        """Return the logits of right-padded rows; causal attention makes them independent of the padding."""
        with self._decoder.frozen(), edit_outputs(self._edits):
            logits: Tensor = super()._model_call(*arguments, **options)
        return logits

    def _model_generate(self, *arguments: Any, **options: Any) -> Tensor:
        """Generate tokens, with injection also at the generated ones, as in an exported checkpoint."""
        with self._decoder.frozen(), edit_outputs(self._edits):
            tokens: Tensor = super()._model_generate(*arguments, **options)
        return tokens


def _require_supported(injection: Injection) -> None:
    """Raise I2CLError on an injection that the harness cannot evaluate."""
    if injection.positions != "all":
        problem = (
            f"the harness injects at all tokens, but this injection has positions={injection.positions!r}"
        )
        raise I2CLError(f"{problem}: fit one with positions=all, or use `i2cl eval`")
    if injection.scoring == "words":
        problem = "the harness scores full label sequences, but this injection uses word-level scoring"
        raise I2CLError(f"{problem}: evaluate it with `i2cl predict`")
    if injection.label_bias is not None:
        raise I2CLError("the harness does not support label priors: fit without --unlabelled")
    if injection.encoder_bias is not None:
        raise I2CLError("the harness does not support sentence encoders: fit with --method anchored")


def _edit_all_tokens(edit: AffineEdit, layer: int, index: int) -> Callable[[Tensor], Tensor]:
    def change(output: Tensor) -> Tensor:
        lines = output.view(-1, *output.shape[-2:])  # OPT's fc2 is 2-D
        return edit.output(layer, index, lines).view(output.shape)

    return change


def main() -> None:
    """Run the harness's command line; errors are one line, with exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except I2CLError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
