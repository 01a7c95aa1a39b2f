import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Gemma3Config

from fitting import close, left_as_found, raises
from i2cl.models.architectures import _ROWS, ARCHITECTURES, Architecture, architecture_of
from i2cl.models.batching import make_batch, pack_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import edit_inputs
from i2cl.models.prefix import cache_argument
from i2cl.models.residual_check import TOLERANCE, ResidualIdentity, residual_identity
from tiny import _CONFIGS, CASES, HALF, MODEL_TYPES, PATHS, VOCABULARY, redrawn, tiny_model, tiny_tokenizer

LENGTHS = (26, 17, 1)
IDS = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
PREFIX = torch.randint(1, VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=CASES)
def model(request):
    model_type, overrides = CASES[request.param]
    return tiny_model(model_type, **overrides)


@pytest.fixture
def gemma2():
    return tiny_model("gemma2")


def padded():
    batch = IDS.clone()
    for row, length in enumerate(LENGTHS):
        batch[row, length:] = 0
    return batch


def logits(model, ids, **arguments):
    with torch.no_grad():
        return model(input_ids=ids, **({"use_cache": False} | arguments)).logits


def at_the_ends(values):
    return torch.stack([values[row, length - 1] for row, length in enumerate(LENGTHS)])


def one_by_one(model, prefix):
    rows = [torch.cat([prefix, IDS[row : row + 1, :length]], 1) for row, length in enumerate(LENGTHS)]
    return torch.stack([logits(model, ids)[0, -1] for ids in rows])


# The residual identity


def test_blocks_add_exactly_their_two_sublayers(model):
    architecture = architecture_of(model)
    identity = residual_identity(model, architecture, IDS)
    assert len(identity.errors) == len(architecture.sublayers(model)) == len(architecture.blocks(model)) >= 2
    assert identity.passed, identity
    for wrong in ({"mlp": architecture.attention}, {"attention": architecture.mlp}):
        assert residual_identity(model, replace(architecture, **wrong), IDS).worst > 1000 * TOLERANCE


@pytest.mark.parametrize(("model_type", "dtype"), HALF)
def test_half_precision_gives_the_right_verdict(model_type, dtype):
    model = tiny_model(model_type, dtype=dtype)
    architecture = architecture_of(model)
    assert residual_identity(model, architecture, IDS).passed
    wrong = replace(architecture, mlp=architecture.attention)
    assert residual_identity(model, wrong, IDS).worst > 1000 * TOLERANCE


@pytest.mark.parametrize("model_type", ["exaone4", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"])
def test_inner_modules_of_post_norm_blocks_fail(model_type):
    wrong = Architecture(model_type, layers="layers", attention="self_attn", mlp="mlp")
    identity = residual_identity(tiny_model(model_type), wrong, IDS)
    assert not identity.passed
    assert identity.worst > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_missing_or_wrong_scale_fails(dtype):
    granite, row = tiny_model("granite", dtype=dtype), ARCHITECTURES["granite"]
    assert row.sublayer_scale(granite.config) == granite.config.residual_multiplier == 0.4
    assert residual_identity(granite, row, IDS).passed
    assert not residual_identity(granite, replace(row, scale=None), IDS).passed
    granite.config.residual_multiplier *= 1.1  # its blocks keep the value they were built with
    assert not residual_identity(granite, row, IDS).passed


@pytest.mark.parametrize(
    ("model_type", "option"),
    [("opt", {"do_layer_norm_before": False}), ("bloom", {"apply_residual_connection_post_layernorm": True})],
)
def test_post_norm_blocks_fail(model_type, option):
    # OPT-350m and some Bloom configs put the norm on the stream, so no two modules are all that is added.
    model = tiny_model(model_type, **option)
    assert not residual_identity(model, architecture_of(model), IDS).passed


def test_invalid_activations_and_writers_fail(gemma2):
    assert not ResidualIdentity((0.0, float("nan"), 0.0)).passed
    llama = tiny_model("llama")
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    assert not residual_identity(llama, architecture_of(llama), IDS).passed
    # With these two options Bloom reads the weights of its output projection but does not call it.
    bloom = tiny_model("bloom", pretraining_tp=2, slow_but_exact=True)
    error = r"'attention' of layer 0 was never run.*BloomBlock"
    raises(error, residual_identity, bloom, architecture_of(bloom), IDS)
    error = r"'mlp' of layer 0 has shape \(3, 26, 48\).*Gemma2DecoderLayer"
    raises(error, residual_identity, gemma2, replace(ARCHITECTURES["gemma2"], mlp="mlp.up_proj"), IDS)


def test_check_restores_the_model(gemma2):
    with left_as_found(gemma2):
        residual_identity(gemma2, architecture_of(gemma2), IDS)


# The table


def test_table_is_sorted_and_complete(gemma2):
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    assert sorted(name for _, names in _ROWS for name in names.split()) == list(ARCHITECTURES)
    assert all(architecture.model_type == name for name, architecture in ARCHITECTURES.items())
    assert set(ARCHITECTURES) == set(MODEL_TYPES)
    assert all(set(names.split()) & set(PATHS) for _, names in _ROWS)  # the chosen paths are of every row
    blocks = list(gemma2.model.layers)
    assert ARCHITECTURES["gemma2"].blocks(gemma2) == blocks
    assert ARCHITECTURES["gemma2"].sublayers(gemma2) == [
        (block.post_attention_layernorm, block.post_feedforward_layernorm) for block in blocks
    ]


def test_language_model_of_a_multimodal_wrapper():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=_CONFIGS["gemma3_text"],
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_id=VOCABULARY - 1,
    )
    wrapper = redrawn(AutoModelForCausalLM.from_config(config)).eval()
    architecture = architecture_of(wrapper)
    assert architecture is ARCHITECTURES["gemma3_text"]
    assert architecture.blocks(wrapper) == list(wrapper.model.language_model.layers)
    assert residual_identity(wrapper, architecture, IDS.clamp(max=VOCABULARY - 2)).passed


def test_unknown_model_type_says_what_to_do():
    config = AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    message = raises("", architecture_of, AutoModelForCausalLM.from_config(config))
    for part in (
        "'openai-gpt'",
        'Architecture(model_type="openai-gpt", layers="layers", attention="self_attn", mlp="mlp")',
        "Decoder.from_pretrained(..., architecture=",
        "i2cl check MODEL --layers layers --attention self_attn --mlp mlp",
        "i2cl ls architectures",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "h"}, r"layers='h' .*Gemma2Model, which has embed_tokens, layers.*right path"),
        ({"layers": "norm"}, r"layers='norm' of Gemma2Model is Gemma2RMSNorm, not a list.*ModuleList"),
        ({"attention": "attn"}, r"attention='attn' .*Gemma2DecoderLayer, which has self_attn.*right path"),
        ({"mlp": "mlp.fc2"}, r"mlp='mlp.fc2' .*Gemma2DecoderLayer.*right path"),
        ({"scale": "multiplier"}, r"scale='multiplier' is not a number .*scale=None"),
    ],
)
def test_wrong_path_is_named_with_a_fix(gemma2, fields, message):
    raises(message, residual_identity, gemma2, replace(ARCHITECTURES["gemma2"], **fields), IDS)


# What the decoder relies on, for every model type


def test_head_input_can_be_gathered_and_right_padding_needs_no_mask(model):
    with edit_inputs([(model.get_output_embeddings(), lambda hidden: hidden[:, -1:])]):
        last = logits(model, IDS)
    assert last.shape == (len(IDS), 1, VOCABULARY)
    assert close(last[:, 0], logits(model, IDS)[:, -1])
    alone = one_by_one(model, PREFIX[:, :0])
    assert close(at_the_ends(logits(model, padded())), alone)
    assert not close(logits(model, padded())[:, -1], alone)


def test_prefix_cache_can_be_reused_with_and_without_position_ids(model):
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model.base_model(input_ids=PREFIX, use_cache=True, **cache_argument(model.base_model, cache))
    seen, (rows, width) = PREFIX.shape[1], IDS.shape
    expected = one_by_one(model, PREFIX)
    for arguments in ({"position_ids": torch.arange(seen, seen + width).expand(rows, -1)}, {}):
        expanded = copy.deepcopy(cache)
        expanded.batch_repeat_interleave(rows)
        after = logits(model, padded(), use_cache=True, **cache_argument(model, expanded), **arguments)
        assert close(at_the_ends(after), expected)
    assert cache.get_seq_length() == seen
    assert not close(at_the_ends(after), one_by_one(model, PREFIX[:, :0]))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_queries_do_not_see_each_other(model_type):
    """``packs`` is correct for models that can be packed and for those that cannot."""
    decoder = Decoder(tiny_model(model_type), tiny_tokenizer(), name=model_type)
    rows = [(5, 9, 2, 7, 30), (11, 40, 3), (3, 250, 17, 40, 41, 42, 8)]
    with torch.no_grad():
        padded = decoder.forward(make_batch(rows, torch.device("cpu")))
        packed = decoder.forward(pack_batch(rows, torch.device("cpu")))
    close = (packed - padded).abs().max() <= 1e-5 * padded.abs().max()
    assert bool(close) == decoder.architecture.packs
