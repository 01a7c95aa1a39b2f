"""Methods fitted on tiny models, and reference values computed with plain transformers models."""

import dataclasses
import threading
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import pytest
import torch

from i2cl import Decoder, Example, I2CLError, Injection, Task, Template, calibrate, extract, make_methods
from i2cl.core.ablations import at_positions
from i2cl.core.injection import LabelHead, Report
from i2cl.core.recipe import ExtractConfig
from i2cl.models.edits import AffineEdit
from tiny import CASES, tiny_model, tiny_tokenizer

FAMILIES = ("llama", "gpt2", "gptj", "gpt_neox", "qwen2")
WORDS = ("positive", "negative")
SHOWN = (("a warm film", 0), ("dull, dull, dull", 1), ("funny and kind all the way", 0), ("no", 1))
PATHS = {  # written down here once more, so that a wrong row of the architectures' table is seen
    "llama": ("model.layers", "self_attn", "mlp"),
    "gpt2": ("transformer.h", "attn", "mlp"),
    "gptj": ("transformer.h", "attn", "mlp"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "qwen2": ("model.layers", "self_attn", "mlp"),
    "opt": ("model.decoder.layers", "self_attn", "fc2"),
    "gemma2": ("model.layers", "post_attention_layernorm", "post_feedforward_layernorm"),
    "falcon": ("transformer.h", "self_attention", "mlp"),
    "bloom": ("transformer.h", "self_attention.dense", "mlp.dense_4h_to_h"),
    "granite": ("model.layers", "self_attn", "mlp"),
}

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
TEXTS = ["a lifeless film", "the best of the year, by far", "hm"]
TASKS = (
    Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}")),
    Task("topics", ("world", "sports", "company"), Template("News: {text} ->{label}")),
    Task("flags", ("no", "yes"), Template("{text}?{label}")),
)
ASKED = ("a warm film", "dull " * 7, "one of the best", "the match was lost", "warm", "a cold and long night")
"""Texts of different lengths."""


def films_in(words):
    """Return a task with these label words and enough rows for a held-out evaluation."""
    adjectives = ("good", "bad", "fine", "poor")
    train = tuple(Example(f"film {number} is {adjectives[number % 4]}", number % 2) for number in range(120))
    template = Template("Review: {text}\nSentiment:{label}")
    return Task("films", words, template, train=train, test=train[:4], shots=2)


def encode(text):
    """Encode a text with the tiny tokenizer."""
    return tuple(tiny_tokenizer()(text)["input_ids"])


def close(actual, wanted):
    """Return whether tensors are equal to five digits of the largest number."""
    return (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@cache
def decoder_of(case, dtype=torch.float32, **overrides):
    """Return a tiny model that tests share and must not change."""
    return new_decoder(case, dtype=dtype, **overrides)


def new_decoder(case, **changes):
    """Return a tiny model of `tiny.CASES`, with changes to its weights or without."""
    model_type, variant = CASES[case]
    return Decoder(tiny_model(model_type, **variant, **changes), tiny_tokenizer(), name=case)


def fit(name, decoder, task, demonstrations, seed=0, **options):
    """Make a method by name, and fit it."""
    (method,) = make_methods([name], options)
    return method.fit(decoder, task, demonstrations, seed)


def injected(decoder, task, shown, config=None, *, extraction=None, seed=0, **more):
    """Extract a context vector from demonstrations, and calibrate it on them."""
    context = extract(decoder, task, shown, extraction, seed=seed)
    return calibrate(decoder, task, shown, context, config, seed=seed, **more)


def free(lock):
    """Return whether another thread can acquire the lock."""
    result = []

    def ask():
        result.append(lock.acquire(blocking=False))
        if result[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return result[0]


def _hooked(model):
    return [tuple(getattr(module, kind)) for module in model.modules() for kind in HOOKS]


def hooks(model):
    """Return the number of hooks of a model."""
    return sum(map(len, _hooked(model)))


def _state(model):
    parts = [(name, type(part), part.training) for name, part in model.named_modules()]
    flags = [(one.dtype, one.requires_grad, one.grad is None) for one in model.parameters()]
    return model.config.to_dict(), parts, _hooked(model), flags


@contextmanager
def left_as_found(model):
    """Check that the block leaves weights, dtypes, flags, gradients, modes, hooks and config unchanged."""
    before, values = _state(model), {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert _state(model) == before
    after = model.state_dict()
    assert after.keys() == values.keys()
    assert all(torch.equal(after[name], value) for name, value in values.items())


def ids(decoder, text):
    """Return the token ids of the tokenizer itself."""
    return decoder.tokenizer(text)["input_ids"]


def first_tokens(decoder, task):
    """Return the first token of each label after a prompt."""
    prompt = task.template.query("x")
    start = len(ids(decoder, prompt))
    return [ids(decoder, prompt + task.template.continuation(word))[start] for word in task.labels]


def random_edit(decoder, seed=0, factor=0.2, around=(0.1, 1.0), sublayers=2):
    """Return a random vector, and random coefficients around a pair, from a seed or a generator."""
    draw = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    values = torch.randn(decoder.layers, sublayers, decoder.d_model, generator=draw)
    noise = torch.randn(decoder.layers, sublayers, 2, generator=draw)
    return values, noise * factor + torch.tensor(around)


def random_injection(decoder, task, seed=0, extraction=None, shown=7, base=None, fields=None, **drawn):
    """Return an injection with a random edit; ``drawn``: see `random_edit`."""
    extraction = extraction or ExtractConfig()
    sublayers = 1 if extraction.sublayers == "hidden" else 2
    values, coefficients = random_edit(decoder, seed, sublayers=sublayers, **drawn)
    fields = {"extraction": extraction, "demonstrations": shown} | (fields or {})
    return injection_of(values, coefficients, task, base or decoder.base, **fields)


def injection_of(*parts, **fields):
    """Return an injection; ``fields`` are fields of the injection, its head or its report."""
    kinds = [{one.name for one in dataclasses.fields(kind)} for kind in (LabelHead, Report)]
    head, report = ({name: fields.pop(name) for name in fields.keys() & kind} for kind in kinds)
    return Injection(*parts, LabelHead(**head), Report(**report), **fields)


def linear_edit(values, coefficients, hook_point="sublayers", positions="all", seed=0):
    """Apply the edit ``lambda v + beta a`` at some tokens."""
    return at_positions(AffineEdit.linear(values, coefficients, hook_point), positions, seed)


def weighted(decoder, injection, seed=0):
    """Return the injection with word-level scoring and random word weights, as large as a fit finds."""
    plain = injection.with_head(scoring="words")
    idf = plain.scorer(decoder).labels.word_weights
    moved = torch.randn(idf.shape, generator=torch.Generator().manual_seed(seed)) / 4
    return plain.with_head(word_weights=idf + moved - moved.mean(0))


def log_probability(decoder, query, label):
    """Return the log-probability of a label's tokens after a query, from one row of the plain model."""
    row = torch.tensor([[*query, *label[:-1]]])
    logits = decoder.model(row, use_cache=False).logits[0, len(query) - 1 :].log_softmax(-1)
    return sum(logits[step, token] for step, token in enumerate(label))


def raises(message, work, /, *given, **options):
    """Check that a call raises an `I2CLError` of one line that matches a pattern. Return its message."""
    with pytest.raises(I2CLError, match=message or None) as raised:
        work(*given, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@contextmanager
def replacing(changes):
    """Replace the outputs of modules during the block, by hooks that do not use `i2cl`.

    ``changes``: pairs of a module and a function from its output to the new one, or to None for no change.
    """
    with ExitStack() as stack:
        for module, change in changes:

            def hook(_module, _args, output, change=change):
                if not isinstance(output, tuple):
                    return change(output)
                new = change(output[0])
                return None if new is None else (new, *output[1:])

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def raw_modules(model, case, hook_point="sublayers"):
    """Return the two sublayers of each block, or the block itself, found by the paths in `PATHS`."""
    path, *names = PATHS[case]
    blocks = model.get_submodule(path)
    return [
        [one] if hook_point == "hidden" else [one.get_submodule(name) for name in names] for one in blocks
    ]


def injecting(decoder, values, coefficients):
    """Make every sublayer return ``lambda v + beta a`` during the block."""

    def mixed(vector, pair, output):
        return pair[0] * vector + pair[1] * output

    modules = [module for pair in decoder.sublayers for module in pair]
    places = zip(values.flatten(0, 1), coefficients.flatten(0, 1), strict=True)
    return replacing(zip(modules, (partial(mixed, *place) for place in places), strict=True))


def block_outputs(decoder, text):
    """Return the output of each block at each token of a text, (layers x tokens x d)."""
    kept = []
    with torch.no_grad(), replacing((block, kept.append) for block in decoder.blocks):
        decoder.model(torch.tensor([ids(decoder, text)]))
    return torch.stack([one[0] for one in kept])


def plain_logits(decoder, prompts):
    """Return the plain model's logits after each prompt."""
    return torch.stack([decoder.model(torch.tensor([ids(decoder, one)])).logits[0, -1] for one in prompts])


def shown_string(task):
    return "".join(task.template.demonstration(text, WORDS[label]) for text, label in SHOWN)
