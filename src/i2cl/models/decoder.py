"""Decoder: the only owner of a model and its tokenizer."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.models import batching
from i2cl.models.architectures import Architecture, architecture_of
from i2cl.models.batching import CPU_KEPT_BUDGET, KEPT_BUDGET, Batch, Ids, longest_first, make_batch
from i2cl.models.edits import AnySite, Edit, Keep, Replay, Site, edit_inputs, editing
from i2cl.models.encoding import Encoder
from i2cl.models.fingerprint import ModelIdentity, tokenizer_fingerprint, told_config, weights_fingerprint
from i2cl.models.loading import NAMES, load_model_and_tokenizer
from i2cl.models.memory import (
    BatchLimit,
    Consensus,
    MemoryWarning,
    is_accelerator_error,
    training_memory,
)
from i2cl.models.precision import Quantization, dtype_name, execution_device, quantization_of, settle_4bit
from i2cl.models.prefix import Prefix, holds_keys_alone, keys_at, window_of
from i2cl.models.residual_check import ResidualIdentity, residual_identity
from i2cl.models.restore import frozen, lock_of
from i2cl.models.trie import Trie, forked_batch

T = TypeVar("T")

# Padded tokens a batch may hold by default. Beyond about 1,000 a CPU gets slower: docs/performance.md.
BUDGET = 16384
CPU_BUDGET = 1024

# Bytes of activations for each token, block and unit of width in 16-bit training, kept for the backward pass
# (Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4.1). Frozen weights need less.
ACTIVATION_BYTES = 34

PROBE = "The quick brown fox jumps over the lazy dog.\nIt does so again, 42 times: why?"


class Decoder:
    """A frozen decoder LLM with its tokenizer: encodes, batches, runs, captures and edits.

    The model is left as found after every call, also after an error: weights, hooks, training mode
    and ``requires_grad``. Calls from several threads wait for each other.

    Attributes:
        model: the transformers causal LM.
        tokenizer: its tokenizer; its padding side is neither used nor changed.
        architecture: where its residual writers are.
        writers: (attention, MLP) residual writers of each layer.
        blocks: the decoder blocks.
        token_budget: maximum number of padded tokens in a batch. After an out-of-memory error batches are
            smaller for a while (`i2cl.models.memory.BatchLimit`); this number stays.
        max_length: context length in tokens, or None where the model has no limit.
        rope_limits: tokens beyond which positions turn by other angles; see `i2cl.models.batching`.
        can_split: whether a row may run in parts, the later ones behind the keys of the first.
    """

    virtual_tokens = 0  # of an adapter, in front of every query; positions count the query's own tokens

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
        settle_4bit(model)
        self.model = model
        self.tokenizer = tokenizer
        self.architecture = architecture or architecture_of(model)
        # Found now and not later, when another thread may have put an adapter around what is looked for.
        self.writers = self.architecture.writers(model)
        self.blocks = self.architecture.blocks(model)
        self.name = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.revision = revision
        self.token_budget = token_budget or (CPU_BUDGET if self.device.type == "cpu" else BUDGET)
        self._inference_limit, self._training_limit = BatchLimit(), BatchLimit()
        self.consensus = Consensus.of(model)
        self.encoder = Encoder.of(tokenizer)
        self.max_length = batching.context_length(model.config.get_text_config(), tokenizer.model_max_length)
        self.rope_limits = batching.rope_limits(model.config.get_text_config())
        self.can_split = holds_keys_alone(model.config)

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
        """As `i2cl.models.loading.load_model_and_tokenizer`; raises I2CLError, also on an unknown type."""
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
        """scikit-learn's clones of an estimator share its model, which none of them changes."""
        return self

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return execution_device(self.model.get_input_embeddings())

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def current_budget(self) -> int:
        """`token_budget`, or what it is lowered to for a while after an out-of-memory error."""
        return self._inference_limit.apply(self.token_budget)

    @cached_property
    def training_memory(self) -> int:
        """Bytes that the activations and gradients of one training batch may take."""
        return self.consensus.smallest(training_memory(self.model, self.device))

    @property
    def token_bytes(self) -> int:
        """Estimated bytes that one token takes in a training batch."""
        return self.layers * self.d_model * ACTIVATION_BYTES * self.model.dtype.itemsize // 2

    @property
    def training_budget(self) -> int:
        """Maximum number of padded tokens in a training batch: `token_budget`, or fewer on little memory."""
        return max(1, min(self.token_budget, self.training_memory // self.token_bytes))

    @cached_property
    def writer_scale(self) -> float:
        """What a block multiplies a writer's output by before adding it."""
        return self.architecture.writer_scale(self.model.config)

    @cached_property
    def base(self) -> ModelIdentity:
        """Identity of the model: name, revision, sizes, configuration and fingerprints.
        Read once, while no other thread uses the model, which may then wear an adapter. That takes about a
        second for a billion parameters in bfloat16 and is not done again: make a new `Decoder` of a model
        whose weights you have changed.
        """
        here = Path(self.name)
        with lock_of(self.model):
            return ModelIdentity(
                name=str(here.resolve()) if self.name not in NAMES and here.exists() else self.name,
                revision=self.revision,
                model_type=self.model.config.model_type,
                layers=self.layers,
                d_model=self.d_model,
                weights=weights_fingerprint(self.model),
                tokenizer=tokenizer_fingerprint(self.tokenizer),
                dtype=dtype_name(self.model.dtype),
                quantization=quantization_of(self.model.config),
                config=told_config(self.model.config),
            )

    @property
    def window(self) -> int | None:
        """Tokens that the layer which sees the fewest sees, or None where every layer sees all."""
        return window_of(self.model.config)

    @cached_property
    def residual_identity(self) -> ResidualIdentity:
        """How exactly the blocks add what the two writers put out, measured once on a few tokens."""
        ids = torch.tensor(self.encoder([PROBE]), device=self.device)
        with self.frozen():
            return residual_identity(self.model, self.architecture, ids)

    @cached_property
    def can_fork(self) -> bool:
        """Whether a row may go on in several ways at once, kept apart by a mask: tried once on a few tokens.
        Some models, those with ALiBi among them, make their masks or positions by themselves.
        """
        ids = self.encoder([PROBE])[0][:12]
        query, ends = ids[:4], (ids[4:], ids[-2:])
        limit = min(self.window or math.inf, self.max_length or math.inf)
        masks = getattr(self.model.config, "_attn_implementation", None) in (None, "eager", "sdpa")
        if not (masks and self.can_split) or self.rope_limits or limit < len(ids) + len(ends[1]):
            return False
        trie = Trie.of(tuple((*end, 0) for end in ends))
        forked = forked_batch([query], [trie], self.device)
        last = [len(query) + trie.edges[steps[-1]][0] for steps in trie.steps]
        places = torch.tensor([last], device=self.device)
        try:
            with self.frozen(), torch.no_grad():
                together = self.forward(forked, at=places)[0].float()
                apart = self.forward(make_batch([query + end for end in ends], self.device))[:, 0].float()
        except (RuntimeError, TypeError, ValueError) as error:  # an attention that takes no such mask
            if is_out_of_memory(error) or is_accelerator_error(error):
                raise
            return False
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.05  # of a logit's range
        size = rounding * (apart[0] - apart[1]).abs().max()
        return bool((together - apart.to(together.device)).abs().max() <= size)

    def require_identity(self) -> None:
        """Refuse a model whose blocks do not simply add their writers, as a post-norm OPT (I2CLError)."""
        if math.isnan(self.residual_identity.worst):
            what = f"activations of {self.name!r} overflow in {dtype_name(self.model.dtype)}"
            raise I2CLError(f"{what}: load the model in another precision (--dtype float32)")
        if not self.residual_identity.passed:
            raise I2CLError(
                f"the blocks of {self.name!r} add something other than its two residual writers put out "
                f"(error {self.residual_identity.worst:.2g}): pass an Architecture that `i2cl check` accepts"
            )

    def sites(self, site: AnySite) -> list[tuple[int, int, torch.nn.Module]]:
        """(layer, index, module) of everything that ``site`` names."""
        if site == "embeddings":
            return [(0, 0, self.model.get_input_embeddings())]
        if site == "hidden":
            return [(layer, 0, block) for layer, block in enumerate(self.blocks)]
        return [(layer, index, pair[index]) for layer, pair in enumerate(self.writers) for index in (0, 1)]

    def pause(self) -> None:
        """Called while the model rests: before each pass, and each backward pass of a fit; for subclasses."""

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

        A batch that runs out of memory is split in two with a warning, and later batches are smaller for a
        while. The order of the queries does not change what a batch holds. Under tensor parallelism all
        processes split alike.

        Args:
            ids: token ids of the queries.
            run: computes the result of a batch.
            reserve: cached tokens before every query. They are kept but not run, so they count only towards
                `KEPT_BUDGET` (`CPU_KEPT_BUDGET`).
            training: whether ``run`` computes gradients, so that `training_budget` applies.
            row_bytes: memory that a query takes in a training batch whatever its length.

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
                extra = row_bytes if training else None
                sizes = iter(self._sizes(lengths, reserve, limit.apply(budget), extra))
            rows = order[start : start + next(sizes)]
            batch = make_batch([ids[row] for row in rows], self.device, rows)
            exceeded = False
            try:
                result = run(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                exceeded = True
            if self.consensus.any(exceeded):
                # What the error's traceback kept alive is free by now.
                limit.shrink(self._halved(len(rows), len(ids[rows[0]]), reserve))
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
        room = max(budget, CPU_KEPT_BUDGET if self.device.type == "cpu" else KEPT_BUDGET)
        sides = reversed(batching.by_side([length + reserve for length in lengths], self.rope_limits))
        # rows from here on that may share a batch
        rests = (rest for side in sides for rest in range(len(side), 0, -1))
        most = []
        for length, rest in zip(lengths, rests, strict=True):
            rows = min(budget // length, room // (length + reserve), rest)
            if row_bytes is not None:
                rows = min(rows, self.training_memory // (length * self.token_bytes + row_bytes))
            most.append(max(1, rows))
        return batching.batch_sizes(lengths, most, budget / batching.PASSES_A_BATCH)

    def _halved(self, rows: int, length: int, reserve: int) -> int:
        """Free cached memory, warn, and return the token limit for half of a batch that did not fit."""
        if rows == 1:
            hint = "shorten it, or load the model in bfloat16 or with device_map='auto'"
            raise I2CLError(f"a query of {length + reserve} tokens does not fit into memory: {hint}")
        empty_cache = getattr(getattr(torch, self.device.type, None), "empty_cache", None)
        if empty_cache is not None:  # cuda, mps and xpu
            empty_cache()
        line = f"out of memory with {rows} queries of {length} tokens; using smaller batches"
        warnings.warn(line, MemoryWarning, stacklevel=3)
        return (rows + 1) // 2 * length

    def forward(
        self,
        batch: Batch,
        *,
        at: Int[Tensor, "batch positions"] | None = None,
        edit: Edit | None = None,
        prefix: Prefix | None = None,
        replay: Replay | None = None,
    ) -> Float[Tensor, "batch positions vocab"]:
        """Next-token logits after the tokens at ``at`` (default: each row's last query token).
        The LM head runs on these positions only. Gradients flow if enabled. If the batch is so
        long that rotary positions change (longrope), the prefix runs again with every row. A packed batch
        takes no prefix, since its queries would attend to each other. Raises I2CLError if a prefix that was
        thinned out, or is made of vectors, would have to run again; or if a window is too short for a
        thinned-out one.
        """
        self.pause()
        positions = (batch.last[:, None] if at is None else at) + self.virtual_tokens
        if prefix is not None and not self._joins(prefix, batch.input_ids.shape[1]):
            batch, positions = batching.behind(batch, prefix.ids), positions + len(prefix.ids)
            prefix = None
        look = partial(batching.gather, positions, batch.packed)
        arguments: dict[str, Any] = {"use_cache": False}
        if batch.position_ids is not None:
            arguments["position_ids"] = batch.position_ids
        if batch.visible is not None:  # added to the attention's logits, as transformers takes it
            hidden = torch.zeros(batch.visible.shape, dtype=self.model.dtype, device=batch.visible.device)
            hidden.masked_fill_(~batch.visible, torch.finfo(hidden.dtype).min)
            arguments["attention_mask"] = hidden[:, None]
        placed: AbstractContextManager[None] = nullcontext()
        if prefix is not None:
            arguments, keys = prefix.in_front_of(batch.input_ids)
            if prefix.kept is not None:
                placed = keys_at(self.model, self.blocks, keys)
        at_head = edit_inputs([(self.model.get_output_embeddings(), look)])
        again = nullcontext() if replay is None else replay.during(batch)
        with lock_of(self.model), placed, at_head, again, editing(edit, self.blocks, self.sites, batch):
            logits: Tensor = self.model(input_ids=batch.input_ids, **arguments).logits
        if not torch.is_grad_enabled():
            # A logit of +inf makes every other token impossible, so that the first label would win a tie of
            # -inf. It becomes NaN, which is refused; finite logits stay as they are.
            logits = logits + 0 * logits.amax(-1, keepdim=True)
        return logits

    def capture(
        self,
        batch: Batch,
        at: Int[Tensor, " batch"] | None = None,
        *,
        site: Site = "writers",
        edit: Edit | None = None,
    ) -> Float[Tensor, "batch layers sites d"]:
        """What each site writes at one token of each row (default: the last), in float32 on the CPU. It is
        seen behind an edit, if any.
        """
        self.pause()
        keep = Keep(site, batch.last if at is None else at)
        with ExitStack() as stack:
            stack.enter_context(self.frozen())
            stack.enter_context(torch.no_grad())
            for one in (edit, keep):
                stack.enter_context(editing(one, self.blocks, self.sites, batch))
            self.model.base_model(input_ids=batch.input_ids, use_cache=False)
        states = torch.stack([kept.float().cpu() for kept in keep.kept], dim=1)
        return states.view(len(states), self.layers, -1, self.d_model)

    def prefix(self, ids: Ids, *, edit: Edit | None = None, whole: bool = False) -> Prefix:
        """Run ``ids`` once, under an edit if any, and keep their keys and values.
        ``whole`` keeps all of them also in layers with a sliding window. Gradients flow to what the edit
        trains, if the caller has them on.
        """
        batch = make_batch([ids], self.device)
        with self.frozen(), editing(edit, self.blocks, self.sites, batch):
            cache = DynamicCache() if whole else DynamicCache(config=self.model.config)
            self.model.base_model(input_ids=batch.input_ids, past_key_values=cache, use_cache=True)
        return Prefix(ids, cache, len(ids), len(ids))

    def embed(self, ids: Ids) -> Float[Tensor, "tokens d"]:
        """The input embeddings of some tokens."""
        places = torch.tensor(ids, dtype=torch.long, device=self.device)
        with self.frozen():
            inputs: Tensor = self.model.get_input_embeddings()(places)
        return inputs

    def read(
        self,
        vectors: Float[Tensor, "places d"],
        positions: Sequence[int] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "places d"]:
        """The last hidden states, behind the final norm, of input embeddings run as one row. Positions count
        from 0 unless given; a cache receives keys and values. Gradients flow if the caller has them on.
        """
        self.pause()
        places = torch.tensor([positions or range(len(vectors))], device=self.device)
        arguments: dict[str, Any] = {"inputs_embeds": vectors[None], "position_ids": places}
        arguments |= {"past_key_values": cache, "use_cache": cache is not None}
        arguments["attention_mask"] = torch.ones_like(places)  # without, places that leap are packed rows
        with self.frozen():
            states: Tensor = self.model.base_model(**arguments).last_hidden_state
        return states[0].to(self.device)  # of several devices, the last has them

    def prefix_of(self, vectors: Float[Tensor, "places d"], positions: Sequence[int] | None = None) -> Prefix:
        """Run input embeddings once, as `read` does, and keep their keys and values."""
        cache = DynamicCache(config=self.model.config)
        self.read(vectors, positions, cache)
        return Prefix((), cache, len(vectors), 1 + max(positions or range(len(vectors))))

    def frozen(self) -> AbstractContextManager[None]:
        """Hold the model as `i2cl.models.restore.frozen` does, until left."""
        return frozen(self.model)

    def _joins(self, prefix: Prefix, width: int) -> bool:
        """Whether a prefix's keys stay in front of ``width`` more tokens: a window counts cached keys."""
        tokens, why = prefix.length + width, ""
        joins = len(batching.by_side([prefix.length, tokens], self.rope_limits)) == 1
        if prefix.thinned and self.window is not None and tokens > self.window:
            why = f"some layers see only {self.window} at a time"
        elif not joins and (prefix.thinned or not prefix.ids):
            limits = " or ".join(map(str, self.rope_limits))
            why = f"beyond {limits} this model's rotary embedding (longrope) turns them otherwise"
        if why:
            raise I2CLError(
                f"demonstrations and query are {tokens} tokens, but {why}, which a thinned-out cache cannot "
                "express: use fewer or shorter demonstrations"
            )
        return joins
