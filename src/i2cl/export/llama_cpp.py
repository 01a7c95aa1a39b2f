"""The check of a GGUF file in llama.cpp itself.

llama-cpp-python binds it: https://llama-cpp-python.readthedocs.io/en/latest/api-reference/.
"""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError, needs
from i2cl.export.calls import lifted
from i2cl.export.golden import Golden, GoldenPrompt
from i2cl.export.verify import Verification, answer_of, compare
from i2cl.models.loading import gguf_reader


class LlamaCpp(AbstractContextManager["LlamaCpp"]):
    """A GGUF file that llama.cpp has loaded, on the CPU, with keys and values in float32.
    A context manager, which frees it at the end. ``length``: the most tokens of a text. Raises I2CLError if
    llama.cpp refuses it, or llama-cpp-python is not installed.
    """

    def __init__(self, path: str | Path, length: int) -> None:
        needs("GGUF", "llama-cpp", "llama_cpp")
        self._library: Any = importlib.import_module("llama_cpp")
        gguf_reader(Path(path), "export it again")  # llama.cpp ends the process on some damaged files
        options = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), length) | {"n_gpu_layers": 0}
        options |= dict.fromkeys(("type_k", "type_v"), self._library.GGML_TYPE_F32)
        try:
            self._model: Any = self._library.Llama(str(path), verbose=False, **options)
        except (ValueError, RuntimeError) as error:
            raise I2CLError(f"llama.cpp does not load {str(path)!r} ({error}): export it again") from None
        self.has_tokenizer = self._model.metadata.get("tokenizer.ggml.model") != "none"

    def __exit__(self, *_error: object) -> None:
        self._model.close()

    def tokens(self, text: str) -> list[int]:
        """What llama.cpp's tokenizer makes of a text, with what it puts in front."""
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Of the token after these, in float32. Raises I2CLError if llama.cpp cannot run them."""
        self._model.reset()
        try:
            self._model.eval(list(ids))
        except (RuntimeError, ValueError) as error:
            raise I2CLError(f"llama.cpp cannot run {len(ids)} tokens ({error})") from None
        values = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(values, shape=(self._model.n_vocab(),)).copy())

    def complete(self, prompt: str | Sequence[int], golden: Golden) -> str:
        """What it completes greedily, asked as an export's calls tell. Raises I2CLError if it cannot."""
        options: dict[str, Any] = {"max_tokens": golden.longest, "temperature": 0}
        if golden.forced:
            options["grammar"] = self._library.LlamaGrammar.from_string(golden.grammar, verbose=False)
            options["logit_bias"] = lifted(golden)
        sent = prompt if isinstance(prompt, str) else list(prompt)
        try:
            reply = self._model.create_completion(sent, **options)
        except (RuntimeError, ValueError) as error:
            raise I2CLError(f"llama.cpp cannot complete {str(sent)[:40]!r} ({error})") from None
        return str(reply["choices"][0]["text"])

    def said(self, prompt: GoldenPrompt, golden: Golden) -> str:
        """The label of one token that greedy decoding says; of tokens where the file has no tokenizer."""
        if self.has_tokenizer:
            query = prompt.ids if prompt.query is None else prompt.query
            return golden.said_in(self.complete(query, golden), whole=golden.forced)
        bias = {int(token): value for token, value in golden.logit_bias(golden.label_bias).items()}
        more = torch.zeros(self._model.n_vocab())
        more[list(bias)] = torch.tensor(list(bias.values()))
        return golden.said([int((self.logits(prompt.ids) + more).argmax())])


def verify_gguf(path: str | Path, *, tolerance: float | None = None) -> Verification:
    """Run a GGUF file in llama.cpp and compare it with its golden values, and its tokens with theirs.

    Args:
        path: a file made by `i2cl.export.export_gguf`, or made from one, such as by ``llama-quantize``.
        tolerance: largest relative difference; default: that of the dtype it was exported in.

    Raises:
        I2CLError: if it has no golden values, llama.cpp refuses it, or a package is not installed.
    """
    golden = Golden.from_export(path)
    tensors = gguf_reader(Path(path), "export it again").tensors
    there = {tensor.name for tensor in tensors if tensor.data.any()}
    room = max(map(len, golden.sequences or golden.spoken)) + 1
    with LlamaCpp(path, room + max(len(prompt.ids) for prompt in golden.prompts)) as model:
        said, whole = partial(model.said, golden=golden), bool(golden.sequences)
        answers = [answer_of(golden, one, model.logits, said, compared=whole) for one in golden.prompts]
        prompts = golden.prompts if model.has_tokenizer else ()
        texts = [(one.query, one.ids) for one in prompts if one.query is not None]
        others = tuple(text for text, ids in texts if model.tokens(text) != ids)
    return replace(compare(golden, answers, tolerance, golden.lost(there)), retokenized=others)
