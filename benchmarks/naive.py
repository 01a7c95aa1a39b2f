"""Straightforward implementation of the paper's algorithm, the baseline of `make bench`.

It uses batches of two with right padding and an attention mask, logits at every position, and hooks that
store full activations of one demonstration at a time. It shares templates, label tokens and the order of
batches with the package, but no code that runs the model, so equal predictions validate the package.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from i2cl import CalibrationConfig, Decoder, Example, Task
from i2cl.models.label_tokens import find_label_tokens

BATCH = 2


class Naive:
    """Context vector, coefficients and predictions of one task on one model."""

    def __init__(self, decoder: Decoder, task: Task, config: CalibrationConfig | None = None) -> None:
        self.model: Any = decoder.model
        self.encode = decoder.encoder
        self.task = task
        self.config = config or CalibrationConfig()
        self.sublayers = [module for pair in decoder.sublayers for module in pair]
        self.words = torch.tensor(
            find_label_tokens(decoder.encoder, task.template, task.labels).representatives
        )
        self.vectors = torch.zeros(len(self.sublayers), decoder.d_model)
        self.coefficients = torch.tensor([self.config.init_lambda, self.config.init_beta])
        self.coefficients = torch.nn.Parameter(self.coefficients.repeat(len(self.sublayers), 1))
        self.generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def extract(self, demonstrations: Sequence[Example]) -> None:
        """Average the attention and MLP outputs at the last token of each demonstration."""
        total = torch.zeros_like(self.vectors)
        for example in demonstrations:
            text = self.task.template.demonstration(example.text, self.task.labels[example.label])
            kept: dict[int, Tensor] = {}
            with (
                torch.no_grad(),
                _hooked(self.sublayers, lambda place, out, kept=kept: kept.update({place: out.clone()})),
            ):
                self._logits([self.encode([text])[0]])
            total += torch.stack([kept[place].view(-1, total.shape[1])[-1] for place in range(len(kept))])
        self.vectors = total / len(demonstrations)

    def calibrate(self, demonstrations: Sequence[Example], steps: Sequence[Sequence[int]]) -> None:
        """Train the coefficients with AdamW on the cross-entropy of the label at the last position."""
        queries = self.encode([self.task.template.query(example.text) for example in demonstrations])
        optimizer = torch.optim.AdamW(
            [self.coefficients], lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        for step, chosen in enumerate(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.config.rate(step, len(steps))
            rows = [queries[row] for row in chosen]
            with _hooked(self.sublayers, self._inject_noisily):
                logits = self._logits(rows)
            last = torch.tensor([len(row) - 1 for row in rows])
            targets = self.words[[demonstrations[row].label for row in chosen]]
            loss = torch.nn.functional.cross_entropy(logits[torch.arange(len(rows)), last], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def scores(self, texts: Sequence[str]) -> Tensor:
        """Return the log-probability of each label, in batches of two texts."""
        queries = self.encode([self.task.template.query(text) for text in texts])
        result = []
        with torch.no_grad(), _hooked(self.sublayers, self._inject):
            for start in range(0, len(queries), BATCH):
                rows = queries[start : start + BATCH]
                last = torch.tensor([len(row) - 1 for row in rows])
                logits = self._logits(rows)[torch.arange(len(rows)), last]
                result.append(logits.log_softmax(-1)[:, self.words])
        return torch.cat(result)

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits

    def _inject(self, place: int, output: Tensor) -> Tensor:
        amount, keep = self.coefficients[place]
        return amount * self.vectors[place] + keep * output

    def _inject_noisily(self, place: int, output: Tensor) -> Tensor:
        injected = self._inject(place, output)
        if not self.config.noise:
            return injected
        noise = torch.randn(injected.shape, generator=self.generator)
        return injected + self.config.noise * injected.detach().norm(dim=-1, keepdim=True) * noise


@contextmanager
def _hooked(modules: Sequence[torch.nn.Module], change: Any) -> Iterator[None]:
    def hook(place: int) -> Any:
        def run(_module: Any, _args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            changed = change(place, first)
            if changed is None:
                return None
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return run

    handles = [module.register_forward_hook(hook(place)) for place, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
