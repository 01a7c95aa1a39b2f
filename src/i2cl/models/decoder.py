"""Decoder: a frozen language model with its tokenizer."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError, MemoryLimitError, is_out_of_memory
from i2cl.models import batching
from i2cl.models.architectures import ARCHITECTURES, Architecture, architecture_of
from i2cl.models.batching import Batch, Ids, longest_first, make_batch
from i2cl.models.edits import AnyHookPoint, CaptureToken, Edit, HookPoint, Replay, edit_inputs, editing
from i2cl.models.encoding import PromptEncoder
from i2cl.models.fingerprint import (
    ModelIdentity,
    inference_config,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from i2cl.models.loading import NAMES, load_model_and_tokenizer
from i2cl.models.memory import BatchLimit, MemoryWarning, training_memory
from i2cl.models.precision import (
    Quantization,
    disable_4bit_repacking,
    dtype_name,
    execution_device,
    quantization_of,
)
from i2cl.models.prefix import Prefix, cache_argument, caches_only_keys_and_values, uses_alibi, window_of
from i2cl.models.residual_check import ResidualIdentity, residual_identity
from i2cl.models.restore import frozen, lock_of

T = TypeVar("T")

DECODER_HINT = "load one with Decoder.from_pretrained"  # for arguments of another type

# Default of `Decoder.token_budget`. Larger batches are slower on a CPU: docs/performance.md.
GPU_BUDGET = 16384
CPU_BUDGET = 1024

# Maximum number of keys of a batch, including cached ones, unless the token budget is larger. Every row gets
# a copy of the cached keys; beyond a few thousand, this costs a CPU more than a larger batch saves
# (docs/performance.md).
GPU_KEY_BUDGET = 16384
CPU_KEY_BUDGET = 4096

# Activation memory of 16-bit training, in bytes per token, block and unit of width (Korthikanti et al.,
# https://arxiv.org/abs/2205.05198, section 4.1). An upper bound, since frozen weights need less.
ACTIVATION_BYTES = 34

MAX_PLAIN_ATTENTION = 512  # tokens; beyond, plain attention takes longer than PyTorch's fused kernel
_ATTENTION = RLock()  # PyTorch's choice of a kernel is one for the whole process

PROBE = "The quick brown fox jumps over the lazy dog.\nIt does so again, 42 times: why?"


@contextmanager
def _plain_attention() -> Iterator[None]:
    with _ATTENTION, sdpa_kernel(SDPBackend.MATH):
        yield


class Decoder:
    """A frozen decoder LLM with its tokenizer: encodes and batches texts, runs the model, captures and edits.

    Every call restores the model (weights, hooks, training mode and ``requires_grad``), also after an error.
    Calls from several threads are serialized.

    Raises I2CLError on an unknown model type without ``architecture``, or a ``token_budget`` below 1.

    Attributes:
        model: the transformers causal LM.
        tokenizer: its tokenizer; the padding side is neither used nor changed.
        architecture: locations of the sublayers.
        sublayers: (attention, MLP) sublayers of each layer.
        blocks: the decoder blocks.
        token_budget: maximum number of padded tokens in a batch. After an out-of-memory error, batches are
            temporarily smaller (`i2cl.models.memory.BatchLimit`); this number does not change.
        max_length: context length in tokens, or None if the model has no limit.
        can_split: whether a row can run in parts, using the cached keys and values of earlier parts.
    """

    virtual_tokens = 0  # tokens that an adapter puts before every query; not counted in positions

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        architecture: Architecture | None = None,
        name: str | None = None,
        revision: str | None = None,
        token_budget: int | None = None,
    ) -> None:
        if token_budget is not None and token_budget < 1:
            raise I2CLError(f"token_budget is {token_budget}: give at least 1, or None for the default")
        disable_4bit_repacking(model)
        self.model = model
        self.tokenizer = tokenizer
        self.architecture = architecture or architecture_of(model)
        # Resolved now: later, another thread may have attached an adapter that wraps these modules.
        self.sublayers = self.architecture.sublayers(model)
        self.blocks = self.architecture.blocks(model)
        self.name = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.revision = revision
        self.token_budget = token_budget or (CPU_BUDGET if self.device.type == "cpu" else GPU_BUDGET)
        self._inference_limit, self._training_limit = BatchLimit(), BatchLimit()
        self.encoder = PromptEncoder.of(tokenizer)
        self.max_length = batching.context_length(model.config.get_text_config(), tokenizer.model_max_length)
        self.can_split = caches_only_keys_and_values(model.config)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: str | dict[str, Any] | None = None,
        offload_folder: str | Path | None = None,
        quantization: Quantization | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        architecture: Architecture | None = None,
        token_budget: int | None = None,
    ) -> "Decoder":
        """Load a model; see `i2cl.models.loading.load_model_and_tokenizer` for the arguments.

        Raises:
            I2CLError: as `load_model_and_tokenizer` and the constructor.
        """
        model, tokenizer = load_model_and_tokenizer(
            name,
            dtype=dtype,
            device=device,
            device_map=device_map,
            offload_folder=offload_folder,
            quantization=quantization,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        options: dict[str, Any] = {"architecture": architecture, "token_budget": token_budget}
        return cls(model, tokenizer, name=str(name), revision=revision, **options)

    def __sklearn_clone__(self) -> "Decoder":
        """Share the model between clones of a scikit-learn estimator, since it is frozen."""
        return self

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return execution_device(self.model.get_input_embeddings())

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    @cached_property
    def sublayer_scale(self) -> float:
        """Factor that a block applies to the outputs of its sublayers."""
        return self.architecture.sublayer_scale(self.model.config)

    @property
    def window(self) -> int | None:
        """Smallest attention window of the layers, in tokens, or None without windows."""
        return window_of(self.model.config)

    @cached_property
    def base(self) -> ModelIdentity:
        """Identity of the model: name, revision, sizes, configuration and fingerprints.

        Computed once, in about a second per billion parameters in bfloat16, and cached: construct a new
        `Decoder` after changing weights.
        """
        path = Path(self.name)
        with lock_of(self.model):  # another thread may have attached an adapter
            return ModelIdentity(
                name=str(path.resolve()) if self.name not in NAMES and path.exists() else self.name,
                revision=self.revision,
                model_type=self.model.config.model_type,
                layers=self.layers,
                d_model=self.d_model,
                weights=weights_fingerprint(self.model),
                tokenizer=tokenizer_fingerprint(self.tokenizer),
                dtype=dtype_name(self.model.dtype),
                quantization=quantization_of(self.model.config),
                config=inference_config(self.model.config),
            )

    @cached_property
    def residual_identity(self) -> ResidualIdentity:
        """Error of the residual identity, measured once on a few tokens."""
        ids = torch.tensor(self.encoder([PROBE]), device=self.device)
        with self.frozen():
            return residual_identity(self.model, self.architecture, ids)

    def require_identity(self) -> None:
        """Raise I2CLError if blocks do more than add their two sublayers, as in a post-norm OPT."""
        if math.isnan(self.residual_identity.worst):
            problem = f"activations of {self.name!r} overflow in {dtype_name(self.model.dtype)}"
            raise I2CLError(f"{problem}: reload it with --dtype float32")
        if not self.residual_identity.passed:
            raise I2CLError(
                f"the blocks of {self.name!r} do not just add the outputs of two sublayers "
                f"(error {self.residual_identity.worst:.2g}): pass an Architecture that `i2cl check` accepts"
            )

    @cached_property
    def can_fork(self) -> bool:
        """Whether several continuations of a query can share a row under a tree attention mask.

        Every supported model type is tested. Excluded are models with ALiBi, which ignores position ids, and
        attention implementations that accept no mask.
        """
        config = self.model.config
        takes_masks = getattr(config, "_attn_implementation", None) in {None, "eager", "sdpa"}
        supported = self.architecture == ARCHITECTURES.get(self.architecture.model_type)
        return supported and takes_masks and self.can_split and not uses_alibi(config)

    def hook_points(self, kind: AnyHookPoint) -> list[tuple[int, int, torch.nn.Module]]:
        """Return (layer, index, module) of every module of a kind."""
        if kind == "embeddings":
            return [(0, 0, self.model.get_input_embeddings())]
        if kind == "hidden":
            return [(layer, 0, block) for layer, block in enumerate(self.blocks)]
        return [(layer, index, pair[index]) for layer, pair in enumerate(self.sublayers) for index in (0, 1)]

    def frozen(self) -> AbstractContextManager[None]:
        """Lock and freeze the model while a block runs; see `i2cl.models.restore.frozen`."""
        return frozen(self.model)

    def pause(self) -> None:
        """Do nothing; subclasses can override this hook, called before each forward and backward pass."""

    def forward(
        self,
        batch: Batch,
        *,
        at: Int[Tensor, "batch positions"] | None = None,
        edit: Edit | None = None,
        prefix: Prefix | None = None,
        replay: Replay | None = None,
    ) -> Float[Tensor, "batch positions vocab"]:
        """Return next-token logits. Gradients flow if the caller enables them.

        Args:
            batch: the queries.
            at: indices in each query's row of the tokens whose next token is predicted; the LM head runs on
                these only. Default: the last token of each query.
            edit: edit of the activations.
            prefix: cached tokens before every query. Not for a packed batch, whose queries would attend to
                each other.
            replay: cached output of the lower blocks.

        Raises:
            I2CLError: if tokens were removed from the prefix, and a sliding window, which counts cached keys,
                is too short.
        """
        self.pause()
        positions = (batch.last[:, None] if at is None else at) + self.virtual_tokens
        arguments: dict[str, Any] = {"use_cache": False}
        if prefix is not None:
            self._require_window(prefix, batch.input_ids.shape[1])
            arguments = prefix.arguments(self.model, batch.input_ids)
        if batch.position_ids is not None:
            start = 0 if prefix is None else prefix.next_position
            arguments["position_ids"] = batch.position_ids + start
        if batch.visible is not None:  # as a mask that transformers adds to the attention's logits
            visible = batch.visible if prefix is None else pad(batch.visible, (prefix.length, 0), value=True)
            mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
            mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
            arguments["attention_mask"] = mask[:, None]
        select = partial(batching.gather, positions, batch.packed)
        head_hook = edit_inputs([(self.model.get_output_embeddings(), select)])
        replaying = nullcontext() if replay is None else replay.during(batch)
        attention = self._attention(batch.input_ids.shape[1])
        edit_hooks = editing(edit, self.blocks, self.hook_points, batch)
        with lock_of(self.model), head_hook, replaying, attention, edit_hooks:
            logits: Tensor = self.model(input_ids=batch.input_ids, **arguments).logits
        if not torch.is_grad_enabled():
            # With a logit of +inf, every other token would get -inf, and the first label would win the tie.
            # So such rows become NaN, which raises an error later; finite logits do not change.
            logits = logits + 0 * logits.amax(-1, keepdim=True)
        return logits

    def _attention(self, width: int) -> AbstractContextManager[None]:
        """Return the context manager that chooses the attention kernel for rows of ``width`` tokens.

        On a CPU the backward pass of PyTorch's fused attention is slow in half precision: plain attention
        saves a third of a whole backward pass over texts of 40 tokens (docs/performance.md).
        """
        is_fused_slow = (
            self.device.type == "cpu" and self.model.dtype.itemsize == 2 and torch.is_grad_enabled()
        )
        return _plain_attention() if is_fused_slow and width <= MAX_PLAIN_ATTENTION else nullcontext()

    def _require_window(self, prefix: Prefix, width: int) -> None:
        """Raise I2CLError if a pruned prefix and ``width`` more tokens exceed a sliding window."""
        tokens = prefix.length + width
        if prefix.is_pruned and self.window is not None and tokens > self.window:
            problem = f"are {tokens} tokens, but some layers attend to only {self.window}"
            raise I2CLError(f"demonstrations and query {problem}: use fewer or shorter demonstrations")

    def capture(
        self,
        batch: Batch,
        at: Int[Tensor, " batch"] | None = None,
        *,
        hook_point: HookPoint = "sublayers",
        edit: Edit | None = None,
    ) -> Float[Tensor, "batch layers sublayers d"]:
        """Return the output at each hook point for one token of each row, in float32 on the CPU.

        Args:
            batch: the rows.
            at: index of the token in each row. Default: the last one.
            hook_point: whose outputs to return.
            edit: edit of the activations; outputs are captured after it.
        """
        self.pause()
        capture = CaptureToken(hook_point, batch.last if at is None else at)
        edit_hooks = editing(edit, self.blocks, self.hook_points, batch)
        capture_hooks = editing(capture, self.blocks, self.hook_points, batch)
        with self.frozen(), torch.no_grad(), edit_hooks, capture_hooks:
            self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        states = torch.stack([output.float().cpu() for output in capture.outputs], dim=1)
        return states.view(len(states), self.layers, -1, self.d_model)

    def prefix(self, ids: Ids, *, edit: Edit | None = None, whole: bool = False) -> Prefix:
        """Run tokens once and cache their keys and values.

        Args:
            ids: token ids.
            edit: edit of the activations. Gradients flow to its parameters if the caller enables them.
            whole: keep the keys and values of all tokens, even in layers with a sliding window.
        """
        batch = make_batch([ids], self.device)
        with self.frozen(), editing(edit, self.blocks, self.hook_points, batch):
            cache = DynamicCache() if whole else DynamicCache(config=self.model.config)
            model = self.model.base_model
            model(input_ids=batch.input_ids, use_cache=True, **cache_argument(model, cache))
        return Prefix(ids, cache, len(ids), len(ids))

    def embed(self, ids: Ids) -> Float[Tensor, "tokens d"]:
        """Return the input embeddings of tokens."""
        input_ids = torch.tensor(ids, dtype=torch.long, device=self.device)
        with self.frozen():
            embeddings: Tensor = self.model.get_input_embeddings()(input_ids)
        return embeddings

    @cached_property
    def training_memory(self) -> int:
        """Bytes that the activations and gradients of one training batch may take."""
        return training_memory(self.model, self.device)

    @property
    def token_bytes(self) -> int:
        """Estimated bytes that one token takes in a training batch."""
        return self.layers * self.d_model * ACTIVATION_BYTES * self.model.dtype.itemsize // 2

    @property
    def training_budget(self) -> int:
        """Maximum number of padded tokens in a training batch: `token_budget`, or fewer on little memory."""
        return max(1, min(self.token_budget, self.training_memory // self.token_bytes))

    def run_batches(
        self,
        ids: Sequence[Ids],
        run: Callable[[Batch], T],
        *,
        reserve: int = 0,
        training: bool = False,
        row_bytes: int = 0,
    ) -> Iterator[tuple[Batch, T]]:
        """Run batches of queries of similar length, longest first, and yield each with its result.

        A batch that runs out of memory is split in two with a warning, and later batches are temporarily
        smaller. The composition of batches does not depend on the order of the queries.

        Args:
            ids: token ids of the queries.
            run: computes the result of a batch.
            reserve: cached tokens before every query. They take memory but are not computed, so they count
                only towards `GPU_KEY_BUDGET` or `CPU_KEY_BUDGET`.
            training: whether ``run`` computes gradients, so that `training_budget` applies.
            row_bytes: memory per query in a training batch, independent of its length.

        Raises:
            I2CLError: if a single query does not fit into memory.
        """
        order, start = longest_first(ids), 0
        limit = self._training_limit if training else self._inference_limit
        sizes: Iterator[int] | None = None
        while start < len(order):
            budget = self.training_budget if training else self.token_budget
            if sizes is None:
                lengths = [len(ids[row]) for row in order[start:]]
                training_row_bytes = row_bytes if training else None
                sizes = iter(self._sizes(lengths, reserve, limit.apply(budget), training_row_bytes))
            rows = order[start : start + next(sizes)]
            batch = make_batch([ids[row] for row in rows], self.device, rows)
            is_too_large = False
            try:
                result = run(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                is_too_large = True
            if is_too_large:  # outside the except block, so that the traceback no longer holds the tensors
                limit.shrink(self._recover(len(rows), len(ids[rows[0]]), reserve))
                sizes = None
                continue
            limit.record_fit(budget)
            yield batch, result
            start += len(rows)

    def _sizes(
        self, lengths: Sequence[int], reserve: int, budget: int, row_bytes: int | None = None
    ) -> list[int]:
        """Return the number of rows of each batch, for rows of these lengths, longest first.

        ``row_bytes``: see `run_batches`; None for batches without gradients.
        """
        key_budget = max(budget, CPU_KEY_BUDGET if self.device.type == "cpu" else GPU_KEY_BUDGET)
        max_rows = []
        for length in lengths:
            rows = min(budget // length, key_budget // (length + reserve))
            if row_bytes is not None:
                rows = min(rows, self.training_memory // (length * self.token_bytes + row_bytes))
            max_rows.append(max(1, rows))
        return batching.batch_sizes(lengths, max_rows, budget * batching.MIN_PASS_COST)

    def _recover(self, rows: int, length: int, reserve: int) -> int:
        """Free cached memory, warn, and return the token limit for half of a batch that did not fit."""
        if rows == 1:
            hint = "shorten it, or load the model in bfloat16 or with device_map='auto'"
            raise MemoryLimitError(f"a query of {length + reserve} tokens does not fit into memory: {hint}")
        empty_cache = getattr(getattr(torch, self.device.type, None), "empty_cache", None)
        if empty_cache is not None:  # cuda, mps and xpu
            empty_cache()
        message = f"out of memory with {rows} queries of {length} tokens; using smaller batches"
        warnings.warn(message, MemoryWarning, stacklevel=3)
        return (rows + 1) // 2 * length
