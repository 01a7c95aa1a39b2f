"""Check an export on the server that runs it: vLLM, or llama.cpp.

Sources: https://docs.vllm.ai/en/latest/models/pooling_models/ (Classification API) and
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

import json
import os
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from i2cl.errors import I2CLError, require_packages
from i2cl.export.golden import Golden, Verification, compare
from i2cl.models.loading import gguf_reader

KEY = "VLLM_API_KEY"  # environment variable with the server's API key, as vLLM's own server reads it
SERVER_TOLERANCE = 0.05  # servers run in lower precision
TIMEOUT = 60.0  # seconds
MAX_VOCABULARY = 1_000_000  # more tokens than any model has


def verify_server(
    golden: Golden,
    url: str,
    *,
    model: str | None = None,
    task: str | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Send the golden texts to a server and compare its answers.

    Args:
        golden: golden answers of the classifier or GGUF file that the server runs, or of any export of
            ``task``.
        url: URL of the server, with or without ``/v1``: llama.cpp for a GGUF file, otherwise vLLM.
        model: the server's name of the classifier; default: the first that it lists.
        task: name of a task on a vLLM server of the base model with the plugin, instead of a classifier.
        tolerance: maximum difference of a probability; default: 0.05, which holds in lower precision.

    Raises:
        I2CLError: if the server cannot be reached, refuses, or does not classify.
    """
    if not url.startswith(("http://", "https://")):
        raise I2CLError(f"{url!r} is not a server's URL: give one such as http://localhost:8000")
    if golden.form in {"causal-lm", "peft"} and task is None:
        problem = "this export is a language model, and a vLLM server is only checked if it classifies"
        raise I2CLError(f"{problem}: export with --to classifier, or name a task of the plugin with --task")
    root = url.rstrip("/").removesuffix("/classify").removesuffix("/v1")
    limit = max(SERVER_TOLERANCE, golden.tolerance) if tolerance is None else tolerance
    ids = None
    try:
        if golden.form == "gguf" and task is None:
            server = LlamaCpp(root)
            logits = torch.tensor([server.log_probs(query, golden.label_tokens) for query in golden.ids])
            probabilities = golden.label_probabilities(logits)
            ids = [server.tokens(prompt) for prompt in golden.prompts]
        else:
            path = "/classify" if task is None else "/v1/i2cl/classify"
            name = task or model or _request(f"{root}/v1/models")["data"][0]["id"]
            reply = _request(f"{root}{path}", {"model": name, "input": golden.texts})
            answers = sorted(reply["data"], key=lambda answer: int(answer["index"]))
            probabilities = torch.tensor([[float(value) for value in answer["probs"]] for answer in answers])
    except I2CLError:
        raise
    except (KeyError, IndexError, TypeError, ValueError):
        raise I2CLError(f"{root} returns no probabilities: does the server run this export?") from None
    if probabilities.shape != (shape := (len(golden.texts), len(golden.labels))):
        sizes = f"{tuple(probabilities.shape)} probabilities instead of {shape}"
        raise I2CLError(f"{root} returns {sizes}: does it run another model?")
    return compare(golden, probabilities, tolerance=limit, ids=ids)


def verify_gguf(path: str | Path, *, tolerance: float | None = None) -> Verification:
    """Run a GGUF file in llama.cpp on the CPU and compare its golden answers and its tokens.

    Args:
        path: a file that `export_gguf` wrote, or one made from it, such as by ``llama-quantize``.
        tolerance: maximum difference of a probability; default: by the dtype of the export.

    Raises:
        I2CLError: if it has no golden answers, llama.cpp cannot load it, or a package is not installed.
    """
    golden = Golden.from_export(path)
    server = start_llama_cpp(path)
    return verify_server(
        golden, server.listening_address, tolerance=golden.tolerance if tolerance is None else tolerance
    )


def start_llama_cpp(path: str | Path) -> Any:
    """Start a llama.cpp server in this process, with keys and values in float32.

    Returns:
        A ``xllamacpp.Server``, which stops when it is garbage-collected.

    Raises:
        I2CLError: if llama.cpp cannot load the file, or xllamacpp is not installed.
    """
    require_packages("GGUF", "llama-cpp", "xllamacpp")
    import xllamacpp

    gguf_reader(Path(path), "export it again")  # llama.cpp ends the process on some damaged files
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # flash attention computes in float16
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1  # no log
    try:
        return xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        raise I2CLError(f"llama.cpp cannot load {str(path)!r} ({error}): export it again") from None


class LlamaCpp:
    """Client of a llama.cpp server.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def tokens(self, text: str) -> list[int]:
        """Encode a text, BOS included."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return list(_request(f"{self.url}/tokenize", body)["tokens"])

    def log_probs(self, ids: list[int], tokens: list[int]) -> list[float]:
        """Return the log-probability of each of some tokens after a prompt."""
        # llama.cpp sends no probabilities if the next token is part of a character. The bias prevents this,
        # and does not change the probabilities.
        body: dict[str, Any] = {"prompt": ids, "n_predict": 1, "n_probs": MAX_VOCABULARY}
        body["logit_bias"] = [[self.tokens("a")[-1], 1000.0]]
        (step,) = _request(f"{self.url}/completion", body)["completion_probabilities"]
        by_token = {token["id"]: token["logprob"] for token in step["top_logprobs"]}
        return [by_token[token] for token in tokens]


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data, headers)  # noqa: S310 - http or https
    try:
        with urlopen(request, timeout=TIMEOUT) as reply:  # noqa: S310
            return json.load(reply)
    except HTTPError as error:
        answer = " ".join(error.read().decode(errors="replace")[:200].split())
        raise I2CLError(f"{url} answers {error.code} ({answer})") from None
    except (OSError, HTTPException) as error:
        raise I2CLError(f"cannot reach {url} ({error}): is the server running?") from None
    except (ValueError, RecursionError):
        raise I2CLError(f"{url} does not return JSON: is it the right server?") from None
