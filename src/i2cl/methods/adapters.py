"""PEFT adapters on a decoder: trained on demonstrations, kept as a small state, taken off again.

Source: https://huggingface.co/docs/peft. The package ``peft`` is the extra of that name.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from i2cl.core.context import require_demonstrations
from i2cl.core.word_weights import WordWeights, token_scores
from i2cl.errors import I2CLError, needs
from i2cl.methods.base import Cost, Method
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.restore import uninterrupted
from i2cl.models.scoring import Progress, Questions
from i2cl.models.training import LabelLikelihood, TrainConfig, train
from i2cl.tasks import Examples, Task

if TYPE_CHECKING:
    from peft import PeftConfig

QUERY_VALUE = ("q_proj", "v_proj")
FUSED = ("query_key_value", "c_attn", "qkv_proj", "Wqkv")
FEED_FORWARD = ("down_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.c_proj")


class AdaptedDecoder(Decoder):
    """A decoder whose model wears an adapter, with ``virtual_tokens`` in front of every query."""

    def __init__(self, bare: Decoder, model: Any, virtual_tokens: int = 0, taken: int = 0) -> None:
        """Run ``model``, a PeftModel around the bare decoder's own."""
        super().__init__(
            bare.model,
            bare.tokenizer,
            architecture=bare.architecture,
            name=bare.name,
            revision=bare.revision,
            token_budget=bare.token_budget,
        )
        self.model = model  # it looks up on the bare model what it does not have
        self.virtual_tokens = virtual_tokens
        self.can_split = self.can_split and not taken  # virtual tokens come in front of every part
        self.max_length = None if bare.max_length is None else bare.max_length - taken
        self.rope_limits = tuple(limit - taken for limit in bare.rope_limits)


class AdapterSettings(TrainConfig):
    """The paper's learning rate of LoRA and IA3, 1e-3; how labels are scored; and whether training learns how
    much each word counts, where words are scored (`i2cl.core.word_weights`).
    """

    lr: float = Field(1e-3, gt=0)
    scoring: Scoring = "auto"
    word_weights: bool = False


class AdapterMethod(Method):
    """Trains an adapter on the demonstrations as single queries, with the schedule of the paper."""

    needs: ClassVar[str] = "demonstrations, the package peft"
    formula: ClassVar[str] = "as trained"
    training: AdapterSettings

    @abstractmethod
    def config(self, decoder: Decoder) -> "PeftConfig":
        """The adapter for this model. Raises I2CLError if the model has nothing that it can adapt."""

    def start(self, decoder: Decoder) -> dict[str, Tensor] | None:
        """The tensors that training starts from, under PEFT's names; None for what PEFT draws."""
        return None

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "AdapterPredictor":
        """Train, keep the adapter's tensors, take it off again. Raises I2CLError without the package peft or
        demonstrations, on a model that the adapter or its start does not fit, or a loss that is not finite.
        """
        needs(self.name, "peft", "peft")
        from peft import get_peft_model_state_dict

        config, start, training = self.config(decoder), self.start(decoder), self.training
        require_demonstrations(task, demonstrations)
        gold, words = [example.label for example in demonstrations], training.loss == "labels"
        with adapted(decoder, config, start, seed) as wearing:
            scorer = Questions.of_fit if words else Questions
            questions = scorer(wearing, task, training.scoring)
            queries = questions.queries([example.text for example in demonstrations])
            labels = [questions.labels] * len(queries)
            likelihood = LabelLikelihood(wearing, queries, labels, gold, among_labels=words)
            learned, moved = None, []
            if training.word_weights and not (words and questions.labels.words):
                raise I2CLError("word_weights takes scoring=words and loss=labels: set these too (--set)")
            if training.word_weights:
                learned = WordWeights(questions.labels, token_scores(wearing, queries, questions.labels))
                moved = [torch.nn.Parameter(torch.zeros_like(learned.start, device=decoder.device))]

            def loss(chosen: Sequence[int]) -> Tensor:
                if learned is not None:
                    likelihood.labels = [questions.labels.weighted(learned.at(*moved))] * len(queries)
                values = likelihood(chosen, lambda rows: likelihood.of_rows(rows, likelihood.batch(rows)))
                return -values.mean(0, keepdim=True)

            parameters = [parameter for parameter in wearing.model.parameters() if parameter.requires_grad]
            parameters += moved
            train(parameters, loss, training.batches(len(gold), seed), training, dtype=decoder.model.dtype)
            state = get_peft_model_state_dict(wearing.model)
            kept = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            weights = learned.at(*moved).detach().cpu() if learned is not None else None
        tensors = [*kept.values(), *([] if weights is None else [weights])]
        cost = Cost.of(*tensors, trained=sum(one.numel() for one in tensors))
        return AdapterPredictor(replace(questions, decoder=decoder, weights=weights), config, kept, cost)


@uninterrupted
def adapted(
    decoder: Decoder, config: "PeftConfig", state: dict[str, Tensor] | None = None, seed: int = 0
) -> Iterator[AdaptedDecoder]:
    """Put an adapter on while the block runs, new or with a trained state; the model is left as found, and so
    are the random numbers, which are the seed's meanwhile. Raises I2CLError if PEFT cannot adapt this model.
    """
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTuner

    drawing = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
    with decoder.frozen(), _as_found(decoder.model), drawing:
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(decoder.model, config)
        except ValueError as error:
            kind, why = decoder.model.config.model_type, " ".join(str(error).split())
            line = f"PEFT cannot adapt this {kind!r}: {why.rstrip('.')}; take another method"
            raise I2CLError(line) from error
        taken = int(getattr(config, "num_virtual_tokens", 0))
        virtual = taken if config.peft_type == "PROMPT_TUNING" else 0
        try:
            if state is not None:
                set_peft_model_state_dict(wrapped, state)
            yield AdaptedDecoder(decoder, wrapped, virtual, taken)
        finally:
            if isinstance(wrapped.base_model, BaseTuner):  # prompt learning leaves the model alone
                wrapped.unload()


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back every module that was replaced, and not taken off again, while the block ran.
    Gradient checkpointing, idle in evaluation, is off: for it PEFT leaves a hook behind at every call.
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
    """The model while it wears a trained adapter, its kind and tensors; between calls it is as it was."""

    questions: Questions  # of the bare decoder
    config: "PeftConfig"
    state: dict[str, Tensor]
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word with the adapter on."""
        with adapted(self.questions.decoder, self.config, self.state) as wearing:  # for this call only
            return replace(self.questions, decoder=wearing).scores(texts, progress=progress)


def attention_targets(decoder: Decoder) -> list[str]:
    """Names of the query and value projections, or of the fused one; raises I2CLError if none is known."""
    for known in (QUERY_VALUE, *((fused,) for fused in FUSED)):
        if all(_has_linear(decoder, one) for one in known):
            return list(known)
    raise I2CLError(f"no query and value projections are known in {decoder.model.config.model_type!r}")


def feed_forward_targets(decoder: Decoder) -> list[str]:
    """Name of the last linear map of the MLP; none where experts hold it in one tensor."""
    return [known for known in FEED_FORWARD if _has_linear(decoder, known)][:1]


def has_transposed_weights(decoder: Decoder) -> bool:
    """Whether the projections are GPT-2's ``Conv1D``, whose weight is (in, out)."""
    return any(isinstance(module, Conv1D) for block in decoder.blocks for module in block.modules())


def _has_linear(decoder: Decoder, called: str) -> bool:
    """Whether the first block has a linear map of this name."""
    return any(
        isinstance(module, nn.Linear | Conv1D) and f".{name}".endswith(f".{called}")
        for name, module in decoder.blocks[0].named_modules()
    )
