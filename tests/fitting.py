"""Methods fitted on tiny models, and what a plain model is asked to compare them with."""

import torch

from i2cl import Decoder
from i2cl.methods import make_methods
from tiny import CASES, tiny_model, tiny_tokenizer


def made(case, **changes):
    """A tiny model of `tiny.CASES`, changed or not."""
    model_type, variant = CASES[case]
    return Decoder(tiny_model(model_type, **variant, **changes), tiny_tokenizer(), name=case)


def fit(name, decoder, task, demonstrations, seed=0, **options):
    """A method by name, fitted."""
    (method,) = make_methods([name], options)
    return method.fit(decoder, task, demonstrations, seed)


def ids(decoder, text):
    """Token ids as the tokenizer itself gives them."""
    return decoder.tokenizer(text)["input_ids"]


def first_tokens(decoder, task):
    """The first token of each label, found behind a prompt."""
    prompt = task.template.query("x")
    start = len(ids(decoder, prompt))
    return [ids(decoder, prompt + task.template.continuation(word))[start] for word in task.labels]


def block_outputs(decoder, text):
    """What each block puts out at each token of a text, (layers x tokens x d)."""
    kept = []
    handles = [
        block.register_forward_hook(
            lambda _module, _args, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in decoder.blocks
    ]
    with torch.no_grad():
        decoder.model(torch.tensor([ids(decoder, text)]))
    for handle in handles:
        handle.remove()
    return torch.stack([one[0] for one in kept])
