"""A folded checkpoint on disk, written shard by shard, and where the base model comes from.

Its config, tokenizer and weights lie in memory, in a folder, or on the hub.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_line
from i2cl.export.calls import write_golden
from i2cl.export.families import family_of
from i2cl.export.folding import (
    Folding,
    StateDict,
    Tensors,
    at_temperature,
    require_known,
    require_named,
    require_unquantized,
    skeleton,
)
from i2cl.export.golden import Golden
from i2cl.export.greedy import biases_of, search_whole
from i2cl.models.checkpoint import INDEX, CheckpointFiles
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import ModelIdentity, inference_config, tokenizer_fingerprint
from i2cl.models.loading import is_gguf, load_model_and_tokenizer, located
from i2cl.storage.atomic import new_folder, require_writable


@dataclass(frozen=True)
class Source:
    """What a checkpoint is made from."""

    config: PreTrainedConfig  # of the model
    tensors: Tensors  # its weights
    tokenizer: PreTrainedTokenizerBase  # saved beside the result
    generation: GenerationConfig | None  # its generation settings, if any


def source_of(source: Decoder | str | Path, revision: str | None) -> Source:
    """A loaded model, or one by its name: a GGUF file is loaded in float32, other weights stay on disk.
    Raises I2CLError if it cannot be found or read, is quantized or in part offloaded, has writers of its own,
    or is of a family that cannot be folded.
    """
    if isinstance(source, Decoder):
        require_known(source)
        require_unquantized(source.model.config)
        model, tokenizer = source.model, source.tokenizer
    elif is_gguf(Path(located(str(source)))):
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "revision": revision}
        model, tokenizer = load_model_and_tokenizer(str(source), **options)
    else:
        return _from_files(str(source), revision)
    return Source(model.config, StateDict(model), tokenizer, model.generation_config)


def _from_files(name: str, revision: str | None) -> Source:
    folder = checkpoint_folder(name, revision)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise I2CLError(f"cannot read the model {name!r}: {first_line(error)}") from None
    require_unquantized(config)
    head = family_of(config).head  # which refuses what has no skeleton
    return Source(config, CheckpointFiles(folder, skeleton(config), head), tokenizer, generation_of(folder))


def generation_of(folder: Path) -> GenerationConfig | None:
    """The generation config in a folder, if there is one. Raises I2CLError if it is damaged."""
    if not (folder / GENERATION_CONFIG_NAME).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        path = str(folder / GENERATION_CONFIG_NAME)
        raise I2CLError(f"{path!r} is damaged ({first_line(error)}): copy it again, or remove it") from None


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """A model's files: bundled, a folder, or the hub's snapshot. Raises I2CLError if there are none."""
    folder = Path(located(name))
    if not folder.is_dir():
        try:
            wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
            unwanted: Any = {"ignore_patterns": ["*/*", "consolidated*"]}
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, **unwanted))
        except (OSError, ValueError) as error:
            why = f"no such folder, and the hub says {type(error).__name__}"
            raise I2CLError(f"no model at {name!r}: {why}") from None
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{name!r} is no model folder: it has no config.json")
    return folder


def export_hf(
    source: Decoder | str | Path,
    injection: Injection,
    output: str | Path,
    *,
    golden: Callable[[], Golden] | None = None,
    revision: str | None = None,
    force: bool = False,
    max_shard_size: int | str = "5GB",
    fold_temperature: bool = False,
) -> None:
    """Write a plain transformers checkpoint that does what the injected model does.

    From a folder, or a hub id, memory holds little more than one shard. The folder appears when it is
    complete: sharded safetensors with their index, config, generation config, tokenizer, and the golden
    values and a README.md where some are given. A label prior becomes a ``sequence_bias`` of the generation
    config, which transformers' `generate` follows
    (https://huggingface.co/docs/transformers/main_classes/text_generation), and so does what makes it say a
    label where the model does not say one by itself (`i2cl.export.Golden.forced`).

    Args:
        source: the base model: a decoder in memory, or the name of one.
        injection: at all positions, into the residual writers.
        output: a folder that is new or empty.
        golden: makes what `i2cl.export.verify` compares with (`i2cl.export.make_golden`); called once
            it is known that the model can be folded. It knows the labels' tokens, which a prior needs.
        revision: of the hub id.
        force: accept other weights of the same shape than those the injection was made on.
        max_shard_size: bytes of a file, such as ``"5GB"``.
        fold_temperature: divide the head by the injection's temperature, so that all probabilities are
            those at it; a head that was the embedding becomes a tensor of its own. Golden values have to
            be made so too.

    Raises:
        I2CLError: if the family or the injection cannot be folded, a folder cannot be used, the injection
            was made on another model, or has a label prior on labels that are scored as whole sequences.
    """
    path = Path(output)
    require_writable(path, frozenset())
    if injection.label_bias is not None and golden is None:
        cure = "leave out --no-golden, or say --drop-prior"
        raise I2CLError(f"a label prior is of tokens that the golden values name: {cure}")
    require_named(injection, named=golden is not None)
    temperature = 1.0
    if fold_temperature:
        injection, temperature = at_temperature(injection), injection.temperature
    base = source_of(source, revision)
    folding = Folding(base.config, base.tensors, injection, base.tokenizer, temperature)
    config: Any = folding.config
    expected = checked_golden(golden, injection, source, base, folding, force=force)
    generation = base.generation
    if expected is not None and expected.sequence_bias:
        generation = with_bias(generation or GenerationConfig.from_model_config(config), expected)
    with new_folder(path, frozenset()) as fresh:
        _write_weights(folding, fresh, max_shard_size)
        config.architectures = [type(skeleton(config)).__name__]
        config.dtype = folding.dtype
        config.save_pretrained(fresh)
        base.tokenizer.save_pretrained(fresh)
        if generation is not None:
            generation.save_pretrained(fresh)
        if expected is not None:
            made = expected.of_export(config.model_type, folding.dtype, folding.bias_norms())
            write_golden(fresh, path.resolve().name, made, "hf")


def checked_golden(
    golden: Callable[[], Golden] | None,
    injection: Injection,
    source: Decoder | str | Path,
    opened: Source,
    folding: Folding,
    *,
    force: bool,
) -> Golden | None:
    """The golden values, where some are asked for. Raises I2CLError if they hold another label prior, or the
    injection was made on another model than the opened source, unless ``force``.
    """
    require_base_of(injection, source, opened, folding, force=force)
    expected = golden() if golden is not None else None
    if expected is not None and expected.label_bias != list(injection.label_bias or ()):
        raise I2CLError("the golden values have another label prior than the injection: make them of it")
    return expected


def require_base_of(
    injection: Injection, source: Decoder | str | Path, opened: Source, folding: Folding, *, force: bool
) -> None:
    """Raise I2CLError if an injection was made on another model than the opened source."""
    if isinstance(source, Decoder):
        injection.require_base(source, force=force)
        return
    config = opened.config
    sizes = config.model_type, config.num_hidden_layers, config.hidden_size
    prints = folding.fingerprint(), tokenizer_fingerprint(opened.tokenizer)
    base = ModelIdentity(str(source), None, *sizes, *prints, config=inference_config(config))
    injection.require_base(base, force=force)


def with_bias(generation: GenerationConfig, golden: Golden) -> GenerationConfig:
    """A generation config that also adds a label prior, and what makes `generate` say a label. Raises
    I2CLError if no token's logit holds the prior, or the base has a bias of its own in its place.
    """
    if golden.sequences and golden.label_bias:
        what = "labels are scored as whole sequences, whose prior no token's logit holds"
        raise I2CLError(f"{what}: leave it out with --drop-prior (in Python: without_label_prior)")
    made = copy.deepcopy(generation)
    bias = biases_of(made)
    added = golden.sequence_bias
    if taken := added.keys() & bias.keys():
        cure = "leave the label prior out with --drop-prior (in Python: without_label_prior)"
        raise I2CLError(
            f"the base's generation config has a sequence_bias on label token {min(taken)[-1]} already: "
            + (cure if golden.label_bias else "take it out of the base's generation_config.json")
        )
    bias |= added
    made.sequence_bias = [[list(tokens), value] for tokens, value in bias.items()]
    if golden.compared:
        search_whole(made, golden.beams, golden.spoken, golden.end)
    return made


def _write_weights(folding: Folding, folder: Path, max_shard_size: int | str) -> None:
    names = {folding.stored(name): name for name in folding.shapes}
    shapes = {stored: folding.shapes[name] for stored, name in names.items()}
    write_shards(folder, shapes, lambda stored: folding.tensor(names[stored]), folding.dtype, max_shard_size)


def write_shards(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    tensor: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> None:
    """Write safetensors shard by shard, with an index if there are several.

    ``tensor`` makes each one by its name when its shard is written. Raises I2CLError on a size of a shard
    that cannot be read.
    """
    with torch.device("meta"):
        empty = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    try:
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    except ValueError:
        raise I2CLError(f"shard size {max_shard_size!r} is no size: give one such as 500MB or 5GB") from None
    size = 0
    for file, chosen in plan.filename_to_tensors.items():
        read = ((name, tensor(name).cpu()) for name in chosen)
        # some share memory, which safetensors refuses
        shard = {name: one.clone(memory_format=torch.contiguous_format) for name, one in read}
        save_file(shard, folder / file, metadata={"format": "pt"})
        size += sum(one.nbytes for one in shard.values())
        shard.clear()  # before the next one is made
    if plan.is_sharded:
        index = {"metadata": {"total_size": size}, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
