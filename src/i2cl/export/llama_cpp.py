"""Check a GGUF export in llama.cpp.

Uses llama-cpp-python: https://llama-cpp-python.readthedocs.io/en/latest/api-reference/.
"""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError, require_packages
from i2cl.export.golden import Golden, Verification, compare
from i2cl.export.verify import sequence_log_probability
from i2cl.models.loading import gguf_reader


class LlamaCpp(AbstractContextManager["LlamaCpp"]):
    """A GGUF file loaded in llama.cpp, on the CPU, with keys and values in float32.

    Args:
        path: of the file.
        length: maximum tokens of a prompt.

    Raises:
        I2CLError: if llama.cpp cannot load it, or llama-cpp-python is not installed.
    """

    def __init__(self, path: str | Path, length: int) -> None:
        require_packages("GGUF", "llama-cpp", "llama_cpp")
        self._library: Any = importlib.import_module("llama_cpp")
        gguf_reader(Path(path), "export it again")  # llama.cpp ends the process on some damaged files
        options = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), length) | {"n_gpu_layers": 0}
        options |= dict.fromkeys(("type_k", "type_v"), self._library.GGML_TYPE_F32)
        try:
            self._model: Any = self._library.Llama(str(path), verbose=False, **options)
        except (ValueError, RuntimeError) as error:
            raise I2CLError(f"llama.cpp cannot load {str(path)!r} ({error}): export it again") from None
        self.has_tokenizer = self._model.metadata.get("tokenizer.ggml.model") != "none"

    def __exit__(self, *_error: object) -> None:
        self._model.close()

    def tokens(self, text: str) -> list[int]:
        """Encode a text with llama.cpp's tokenizer, BOS included."""
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))

    def logits(self, ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Return the logits of the next token. Raises I2CLError if llama.cpp cannot run these tokens."""
        self._model.reset()
        try:
            self._model.eval(list(ids))
        except (RuntimeError, ValueError) as error:
            raise I2CLError(f"llama.cpp cannot run {len(ids)} tokens ({error})") from None
        values = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(values, shape=(self._model.n_vocab(),)).copy())


def verify_gguf(path: str | Path, *, tolerance: float | None = None) -> Verification:
    """Run a GGUF file in llama.cpp and compare its golden answers and its tokens.

    Args:
        path: a file that `export_gguf` wrote, or one made from it, such as by ``llama-quantize``.
        tolerance: maximum difference of a probability; default: by the dtype of the export.

    Raises:
        I2CLError: if it has no golden answers, llama.cpp cannot load it, or a package is not installed.
    """
    golden = Golden.from_export(path)
    tensors = gguf_reader(Path(path), "export it again").tensors
    nonzero = {tensor.name for tensor in tensors if tensor.data.any()}
    longest = max(map(len, golden.ids)) + max(map(len, golden.label_tokens))
    with LlamaCpp(path, longest) as model:
        found = torch.tensor([_label_scores(model, ids, golden) for ids in golden.ids])
        ids = [model.tokens(prompt) for prompt in golden.prompts] if model.has_tokenizer else None
    missing = [name for name in golden.biases if name not in nonzero]
    found = golden.label_probabilities(found)
    return compare(golden, found, tolerance=tolerance, ids=ids, missing=missing)


def _label_scores(model: LlamaCpp, ids: Sequence[int], golden: Golden) -> list[float]:
    prefixes = {tuple(tokens[:end]) for tokens in golden.label_tokens for end in range(len(tokens))}
    logits = {prefix: model.logits([*ids, *prefix]) for prefix in prefixes}
    scores = []
    for tokens in golden.label_tokens:
        rows = [logits[tuple(tokens[:end])] for end in range(len(tokens))]
        scores.append(sequence_log_probability(torch.stack(rows), tokens))
    return scores
