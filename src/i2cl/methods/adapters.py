"""PEFT adapters on a shared decoder: trained on demonstrations, attached only while they are used.

Source: https://huggingface.co/docs/peft (install with the extra ``peft``).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from i2cl.core.context import require_demonstrations
from i2cl.core.word_weights import WordWeights, token_scores
from i2cl.errors import I2CLError, require_packages
from i2cl.methods.base import Cost, LabelScores, Method
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import Scoring
from i2cl.models.scoring import LabelScorer, Progress
from i2cl.models.training import LabelLikelihood, TrainConfig, train
from i2cl.tasks import Examples, Task

if TYPE_CHECKING:
    from peft import PeftConfig

QUERY_VALUE_PROJECTIONS = ("q_proj", "v_proj")
FUSED_PROJECTIONS = ("query_key_value", "c_attn", "qkv_proj", "Wqkv")
MLP_OUTPUT_PROJECTIONS = ("down_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.c_proj")


class AdaptedDecoder(Decoder):
    """A decoder with an adapter attached.

    Args:
        base: the decoder without the adapter.
        model: a PeftModel that wraps the base decoder's model.
        virtual_tokens: number of virtual tokens that the model prepends to the input embeddings.
        context_used: number of virtual tokens that take up context, in the input or in every layer.
    """

    def __init__(self, base: Decoder, model: Any, virtual_tokens: int = 0, context_used: int = 0) -> None:
        super().__init__(
            base.model,
            base.tokenizer,
            architecture=base.architecture,
            name=base.name,
            revision=base.revision,
            token_budget=base.token_budget,
        )
        self.model = model  # a PeftModel forwards unknown attributes to the base model
        self.virtual_tokens = virtual_tokens
        # PEFT adds the virtual tokens to every forward pass, so a row cannot be split over several
        self.can_split = self.can_split and not context_used
        self.max_length = None if base.max_length is None else base.max_length - context_used


class AdapterSettings(TrainConfig):
    """Training options; the learning rate is the paper's for LoRA and IA3.

    ``word_weights`` also learns a weight for each word and label, with word-level scoring
    (`i2cl.core.word_weights`).
    """

    lr: float = Field(1e-3, gt=0)
    scoring: Scoring = "auto"
    word_weights: bool = False


class AdapterMethod(Method):
    """Trains an adapter on single demonstrations with the paper's schedule."""

    needs = "demonstrations, the package peft"
    training: AdapterSettings

    @abstractmethod
    def config(self, decoder: Decoder) -> "PeftConfig":
        """Return PEFT's configuration for this model. Raises I2CLError if the model is unsupported."""

    def start(self, decoder: Decoder) -> dict[str, Tensor] | None:
        """Return initial tensors by PEFT's names, or None for PEFT's random initialization."""
        return None

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "AdapterPredictor":
        """Train an adapter, copy its tensors and detach it.

        Raises:
            I2CLError: if peft is not installed, the demonstrations are empty, the adapter or its initial
                tensors do not fit the model, or the loss is not finite.
        """
        require_packages(self.name, "peft", "peft")
        from peft import get_peft_model_state_dict

        config, start, training = self.config(decoder), self.start(decoder), self.training
        require_demonstrations(task, demonstrations)
        gold, words = [example.label for example in demonstrations], training.loss == "labels"
        with adapted(decoder, config, start, seed) as adapted_decoder:
            make_scorer = LabelScorer.for_fit if words else LabelScorer
            scorer = make_scorer(adapted_decoder, task, training.scoring)
            queries = scorer.queries([example.text for example in demonstrations])
            likelihood = LabelLikelihood(adapted_decoder, queries, scorer.labels, gold, among_labels=words)
            word_weights, weight_changes = None, []
            if training.word_weights and not (words and scorer.labels.word_tokens):
                raise I2CLError("word_weights requires scoring=words and loss=labels: set them too (--set)")
            if training.word_weights:
                word_weights = WordWeights(
                    scorer.labels, token_scores(adapted_decoder, queries, scorer.labels)
                )
                changes = torch.zeros_like(word_weights.start, device=decoder.device)
                weight_changes = [torch.nn.Parameter(changes)]

            def loss(chosen: Sequence[int]) -> Tensor:
                if word_weights is not None:
                    weights = word_weights.at(*weight_changes)
                    likelihood.labels = scorer.labels.with_word_weights(weights)
                return -likelihood.log_probs(chosen, likelihood.batch(chosen)).mean()

            parameters = [
                parameter for parameter in adapted_decoder.model.parameters() if parameter.requires_grad
            ]
            parameters += weight_changes
            train(parameters, loss, training.batches(len(gold), seed), training, dtype=decoder.model.dtype)
            state = get_peft_model_state_dict(adapted_decoder.model)
            trained = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            weights = word_weights.at(*weight_changes).detach().cpu() if word_weights is not None else None
        tensors = [*trained.values(), *([] if weights is None else [weights])]
        cost = Cost.of(*tensors, trained=sum(tensor.numel() for tensor in tensors))
        return AdapterPredictor(replace(scorer, decoder=decoder, word_weights=weights), config, trained, cost)


@contextmanager
def adapted(
    decoder: Decoder, config: "PeftConfig", state: dict[str, Tensor] | None = None, seed: int = 0
) -> Iterator[AdaptedDecoder]:
    """Attach an adapter while the block runs, then restore the model and the global random state.

    Args:
        decoder: the decoder without the adapter.
        config: PEFT's configuration of the adapter.
        state: trained tensors. Default: a new adapter.
        seed: seed of the initialization, and of torch's random numbers in the block.

    Raises:
        I2CLError: if PEFT does not support the model.
    """
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTuner

    random_state = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
    with decoder.frozen(), _restore_modules(decoder.model), random_state:
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(decoder.model, config)
        except ValueError as error:
            kind, reason = decoder.model.config.model_type, " ".join(str(error).split()).rstrip(".")
            raise I2CLError(f"PEFT does not support this {kind!r}: {reason}; use another method") from error
        context_used = int(getattr(config, "num_virtual_tokens", 0))
        virtual_tokens = context_used if config.peft_type == "PROMPT_TUNING" else 0
        try:
            if state is not None:
                set_peft_model_state_dict(wrapped, state)
            yield AdaptedDecoder(decoder, wrapped, virtual_tokens, context_used)
        finally:
            if isinstance(wrapped.base_model, BaseTuner):  # prompt learning does not change the model
                wrapped.unload()


@contextmanager
def _restore_modules(model: nn.Module) -> Iterator[None]:
    """Restore modules that were replaced in the block, and disable gradient checkpointing in it.

    Gradient checkpointing has no effect in evaluation mode, but with it PEFT registers a hook at every call
    and does not remove it.
    """
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for parent, name, child in children:
            if getattr(parent, name) is not child:
                setattr(parent, name, child)
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@dataclass(frozen=True)
class AdapterPredictor:
    """A trained adapter, attached to the shared model during each call."""

    scorer: LabelScorer  # with the decoder without the adapter
    config: "PeftConfig"
    state: dict[str, Tensor]
    cost: Cost

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the log-probability of each label word."""
        with adapted(self.scorer.decoder, self.config, self.state) as adapted_decoder:
            return replace(self.scorer, decoder=adapted_decoder).scores(texts, progress=progress)


def attention_targets(decoder: Decoder) -> list[str]:
    """Return the names of the query and value projections, or of the fused one.

    Raises:
        I2CLError: if the model has neither.
    """
    for names in (QUERY_VALUE_PROJECTIONS, *((fused,) for fused in FUSED_PROJECTIONS)):
        if all(_has_linear(decoder, name) for name in names):
            return list(names)
    kind = decoder.model.config.model_type
    raise I2CLError(f"no query and value projections are known for {kind!r}: use another method")


def feed_forward_targets(decoder: Decoder) -> list[str]:
    """Return the name of the MLP's output projection; none if experts store it in one tensor."""
    return [name for name in MLP_OUTPUT_PROJECTIONS if _has_linear(decoder, name)][:1]


def has_transposed_weights(decoder: Decoder) -> bool:
    """Return whether the projections are GPT-2's ``Conv1D``, with weights of shape (in, out)."""
    return any(isinstance(module, Conv1D) for block in decoder.blocks for module in block.modules())


def _has_linear(decoder: Decoder, name: str) -> bool:
    """Return whether the first block has a linear layer with this name."""
    return any(
        isinstance(module, nn.Linear | Conv1D) and f".{path}".endswith(f".{name}")
        for path, module in decoder.blocks[0].named_modules()
    )
