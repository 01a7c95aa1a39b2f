"""Injections in EleutherAI's lm-evaluation-harness, as its model type ``i2cl``.

The harness finds no models of other packages on its own, so ``python -m i2cl.interfaces.harness`` is its
command line with this one registered (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/interface.md).
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from i2cl.core.edits import LinearEdit
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, needs
from i2cl.models.decoder import Decoder
from i2cl.models.edits import edit_outputs
from i2cl.models.loading import is_gguf, located

try:
    needs("the harness", "harness", "lm_eval")
except I2CLError as error:
    if __name__ != "__main__":
        raise
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

ENCODED = ("a sentence encoder", "by --method anchored or i2cl")
NAME = "i2cl"  # what ``--model`` calls it


@register_model(NAME)
class I2CLHarness(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """A Hugging Face model of the harness whose residual writers are injected at every token it runs.

    That is what an exported checkpoint does under ``--model hf`` (docs/guide/export.md), and what
    `Injection.scores` does where whole label sequences are scored (``scoring="full"``). A continuation's
    log-likelihood is divided by the injection's temperature, as a label's is: accuracy stays, and a metric
    such as ``brier_score`` reads the probabilities among the choices. Perplexities of text stay.

    Args:
        injection: an `Injection`, or the folder or hub id of one; None runs the plain model.
        pretrained: name, folder or ``"reference"``; or a `Decoder`. Default: the injection's base model.
        force: accept another model of the same shape.
        revision: of the model. Default: the injection's.
        options: everything else goes to the harness's own ``HFLM``: batch_size, dtype, device, parallelize,
            add_bos_token and so on.

    Raises:
        I2CLError: on an injection at some tokens only, one with a label prior or that tells labels by their
            words, one with a sentence encoder, or one that does not belong to the model.
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
        if chosen is not None and chosen.positions != "all":
            what = f"the harness injects all tokens, this injection is for positions={chosen.positions!r}"
            raise I2CLError(f"{what}: fit one at all positions, or use `i2cl eval`")
        if chosen is not None and chosen.scoring == "words":
            what = "the harness scores whole labels, and this injection tells labels by their words"
            raise I2CLError(f"{what}: measure it with `i2cl predict`")
        if chosen is not None and (chosen.label_bias, chosen.encoder_bias) != (None, None):
            what, cure = ("a label prior", "without --unlabelled") if chosen.label_bias else ENCODED
            alone = f"the harness scores any text and not labels alone, to which {what} belongs"
            raise I2CLError(f"{alone}: fit one {cure}")
        if pretrained is None and chosen is not None:
            pretrained, revision = chosen.base.name, revision or chosen.base.revision
        if isinstance(pretrained, str | Path) and is_gguf(Path(located(str(pretrained)))):
            held = {key: options.pop(key, None) for key in ("dtype", "device")}
            pretrained = Decoder.from_pretrained(str(pretrained), revision=revision, **held)
        if isinstance(pretrained, Decoder):
            self._decoder = pretrained
            with pretrained.frozen():
                super().__init__(pretrained.model, tokenizer=pretrained.tokenizer, **options)
        else:
            source = located(str(pretrained))
            defaults: dict[str, Any] = {"use_safetensors": True, "revision": revision or "main"}
            if not torch.accelerator.is_available():
                defaults["device"] = "cpu"  # it would insist on CUDA
            super().__init__(source, **defaults | options)
            self._decoder = Decoder(self.model, self._plain_tokenizer, name=str(pretrained))
        self._temperature = 1.0 if chosen is None else chosen.temperature
        self._changes: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        if chosen is not None:
            chosen.require_base(self._decoder, force=force)
            edit = chosen.edit()
            sites = self._decoder.sites(edit.site)
            self._changes = [(module, _everywhere(edit, layer, index)) for layer, index, module in sites]

    def _create_tokenizer(self, *arguments: Any, **options: Any) -> None:
        """Work on a copy: the harness goes on to give it a padding token, which the model's own may lack."""
        super()._create_tokenizer(*arguments, **options)
        self._plain_tokenizer: Any = self.tokenizer
        self.tokenizer: Any = copy.deepcopy(self.tokenizer)

    def loglikelihood(self, *arguments: Any, **options: Any) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations over the temperature, and whether each is the greedy one."""
        pairs = super().loglikelihood(*arguments, **options)
        return [(value / self._temperature, greedy) for value, greedy in pairs]

    def _model_call(self, *arguments: Any, **options: Any) -> Tensor:
        """Logits of right-padded rows, which causal attention makes those of the rows alone."""
        with self._decoder.frozen(), edit_outputs(self._changes):
            logits: Tensor = super()._model_call(*arguments, **options)
        return logits

    def _model_generate(self, *arguments: Any, **options: Any) -> Tensor:
        """Greedy or sampled tokens; what is generated is injected too, as in a folded checkpoint."""
        with self._decoder.frozen(), edit_outputs(self._changes):
            tokens: Tensor = super()._model_generate(*arguments, **options)
        return tokens


def _everywhere(edit: LinearEdit, layer: int, index: int) -> Callable[[Tensor], Tensor]:
    def change(output: Tensor) -> Tensor:
        lines = output.view(-1, *output.shape[-2:])  # OPT's fc2 is 2-D
        return edit.injected(layer, index, lines).view(output.shape)

    return change


def main() -> None:
    """The harness's own command line; bad input is one line, and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except I2CLError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
