import copy
from unittest.mock import Mock

import pytest
import torch

from fitting import close, decoder_of, free, left_as_found, raises
from i2cl import Architecture, CalibrationConfig, Decoder, ExtractConfig, calibrate, extract
from i2cl.models.batching import make_batch
from i2cl.models.edits import Edit
from i2cl.models.label_tokens import find_label_tokens
from i2cl.models.prefix import window_of
from i2cl.models.restore import lock_of
from i2cl.models.scoring import score
from i2cl.tasks import Example, Task, Template
from tiny import VOCABULARY, WINDOW, tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "opt", "gemma2", "falcon", "bloom"]
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = [Example("a warm film", 0), Example("a dull and lifeless film", 1), Example("funny", 0)]
CPU = torch.device("cpu")
ROWS = [(5, 9, 2, 7), (11,), (3, 250, 17, 40, 41, 42, 8)]
BATCH = make_batch(ROWS, CPU)


# What it says about a model


def test_sizes_name_and_context_length(decoder):
    assert (decoder.layers, decoder.d_model, decoder.max_length) == (2, 32, 1024)
    assert len(decoder.sublayers) == len(decoder.blocks) == 2
    assert decoder.base.name == decoder.name == "tiny-llama"
    assert (decoder.base.layers, decoder.base.d_model, decoder.base.model_type) == (2, 32, "llama")
    assert Decoder(tiny_model("llama"), tiny_tokenizer()).name == "LlamaForCausalLM"
    for model_type in ("gpt2", "gptj", "mpt", "opt"):
        assert decoder_of(model_type).max_length == 1024, model_type
    assert decoder_of("bloom").max_length is None
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 77
    assert Decoder(tiny_model("bloom"), tokenizer).max_length == 77


@pytest.mark.parametrize("budget", [0, -1])
def test_token_budget_below_one_is_refused(budget):
    message = f"token_budget is {budget}: give at least 1, or None"
    raises(message, Decoder, tiny_model("llama"), tiny_tokenizer(), token_budget=budget)


def test_unknown_model_types_take_an_architecture():
    model = tiny_model("llama")
    model.config.model_type = "llama-of-a-neighbour"
    raises("llama-of-a-neighbour", Decoder, model, tiny_tokenizer())
    own = Architecture("llama-of-a-neighbour", "layers", "self_attn", "mlp")
    assert len(Decoder(model, tiny_tokenizer(), architecture=own).sublayers) == 2


# Logits


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_at_chosen_positions(case):
    decoder = decoder_of(case)
    at = torch.tensor([[0, 3], [0, 0], [6, 2]])
    with torch.no_grad():
        result, last = decoder.forward(BATCH, at=at), decoder.forward(BATCH)
        for row, ids in enumerate(ROWS):
            alone = decoder.model(torch.tensor([ids]), use_cache=False).logits[0]
            assert close(result[row], alone[at[row]])
            assert close(last[row, 0], alone[-1])


def test_lm_head_runs_only_at_the_chosen_positions(decoder):
    seen = []
    head = decoder.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    decoder.forward(BATCH)
    handle.remove()
    assert seen == [(3, 1, VOCABULARY)]


# Capture


def test_capture_is_float32_on_the_cpu():
    result = decoder_of("llama", torch.bfloat16).capture(BATCH)
    assert (result.dtype, result.device, result.requires_grad) == (torch.float32, CPU, False)


# The prefix cache


@pytest.mark.parametrize(
    ("case", "overrides", "width", "tokens"),
    [
        ("llama", {}, 2 * 8, 2 * 13),
        ("llama", {"num_key_value_heads": 4}, 4 * 8, 2 * 13),
        ("llama", {"num_key_value_heads": 1}, 8, 2 * 13),
        ("gpt2", {}, 32, 2 * 13),
        ("falcon", {}, 8, 2 * 13),  # multi-query
        ("gemma2", {}, 2 * 8, 13 + 2 * (WINDOW - 1)),  # one full layer, two that see a window
    ],
)
def test_cached_values(case, overrides, width, tokens):
    prefix = Decoder(tiny_model(case, **overrides), tiny_tokenizer()).prefix(tuple(range(1, 14)))
    assert prefix.expanded(3).layers[0].keys.shape[0] == 3
    assert prefix.values == 2 * width * tokens


# The model is left as found


def odd(case):
    """A model with user-defined flags and hooks."""
    model = tiny_model(case).train()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    block = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    block.register_forward_hook(lambda *_: None)
    block.register_forward_pre_hook(lambda *_: None)
    return model


class Failing(Edit):
    def __init__(self, error):
        self.error = error

    def output(self, layer, index, output, batch):
        if layer == 1:
            raise self.error


def calibrated(decoder, **arguments):
    context = extract(decoder, TASK, SHOTS)
    return calibrate(decoder, TASK, SHOTS, context, CalibrationConfig(epochs=1), **arguments)


def failing_score(decoder, error):
    labels = find_label_tokens(decoder.encoder, TASK.template, TASK.labels)
    score(decoder, ROWS, labels, edit=Failing(error), prefix=decoder.prefix((1, 2, 3)))


def failing_progress(decoder, error):
    calibrated(decoder, progress=Mock(side_effect=error))


WORK = {
    "score": lambda decoder: calibrated(decoder).log_probs(decoder, ["a", "a dull film"]),
    "sequence": lambda decoder: calibrated(decoder).log_probs(decoder, ["a", "b c"], scoring="sequence"),
    "capture": lambda decoder: decoder.capture(BATCH),
    "hidden": lambda decoder: extract(decoder, TASK, SHOTS, ExtractConfig(sublayers="hidden")),
    "prefix": lambda decoder: decoder.prefix((1, 2, 3)),
    "calibrate": calibrated,
}


@pytest.mark.parametrize("case", FAMILIES)
def test_model_is_restored(case):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    decoder = Decoder(odd(case), tokenizer)
    for work in WORK.values():
        with left_as_found(decoder.model):
            work(decoder)
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("work", [failing_score, failing_progress])
@pytest.mark.parametrize("case", ["llama", "opt"])
def test_model_is_restored_after_an_error(case, work, error):
    decoder = Decoder(odd(case), tiny_tokenizer())
    with left_as_found(decoder.model), pytest.raises(error):
        work(decoder, error)


def test_use_does_not_disturb_training_of_the_same_model():
    model = tiny_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.5, embd_pdrop=0.0)
    model.config.resid_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    decoder = Decoder(model.train(), tiny_tokenizer())
    assert torch.equal(decoder.capture(BATCH), decoder.capture(BATCH))  # no dropout while it works
    result = calibrated(decoder).coefficients
    assert torch.equal(result, calibrated(decoder).coefficients)
    assert model.training
    model(BATCH.input_ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_edit_that_returns_none_changes_nothing(decoder):
    class Look(Edit):
        sees_input = True

        def __init__(self):
            self.entered, self.seen = [], []

        def enter(self, layer, residual):
            self.entered.append((layer, residual.shape))

        def output(self, layer, index, output, batch):
            self.seen.append((layer, index, batch is BATCH))

    look = Look()
    assert torch.equal(decoder.forward(BATCH, edit=look), decoder.forward(BATCH))
    assert look.entered == [(layer, (3, 7, 32)) for layer in (0, 1)]
    assert look.seen == [(layer, index, True) for layer in (0, 1) for index in (0, 1)]


@pytest.mark.parametrize(
    ("dtype", "training", "limit", "plain"),
    [
        (torch.bfloat16, True, 512, True),
        (torch.bfloat16, True, 6, False),  # a text of 7 tokens is longer
        (torch.bfloat16, False, 512, False),
        (torch.float32, True, 512, False),
    ],
)
def test_plain_attention_in_half_precision_training_alone(monkeypatch, dtype, training, limit, plain):
    class Look(Edit):
        def output(self, layer, index, output, batch):
            fused.append(torch.backends.cuda.flash_sdp_enabled())

    fused = []
    monkeypatch.setattr("i2cl.models.decoder.MAX_PLAIN_ATTENTION", limit)
    with torch.set_grad_enabled(training):
        decoder_of("llama", dtype).forward(BATCH, edit=Look())
    assert fused == [not plain] * 4
    assert torch.backends.cuda.flash_sdp_enabled()


def test_decoders_of_one_model_share_its_lock():
    model = tiny_model("llama")
    one, other = (Decoder(model, tiny_tokenizer(), name="tiny") for _ in range(2))
    before = one.capture(BATCH)
    assert lock_of(copy.copy(one).model) is lock_of(model)
    assert lock_of(copy.deepcopy(one).model) is not lock_of(model)
    with one.frozen():
        calibrated(other)
        assert not free(lock_of(other.model))
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert free(lock_of(model))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(one.capture(BATCH), before)


@pytest.mark.parametrize(
    ("model_type", "changes", "window"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 8}, 8),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 8}, None),
        ("ministral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, None),
        ("ministral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, 8),
        ("llama4_text", {"attention_chunk_size": 16}, 16),
    ],
)
def test_window_is_the_smallest_of_the_layers_in_use(model_type, changes, window):
    assert window_of(tiny_model(model_type, **changes).config) == window
