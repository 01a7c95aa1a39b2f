"""The check of an export against a server that speaks OpenAI's completions protocol.

https://platform.openai.com/docs/api-reference/completions; vLLM, SGLang and llama.cpp speak it.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from i2cl.errors import I2CLError
from i2cl.export.calls import sent_to_servers
from i2cl.export.golden import Golden, GoldenPrompt
from i2cl.export.verify import Answer, by_whole_labels

TOLERANCE = 0.05  # servers run in lower precision

# Environment variable of the key that is sent, by the name that vLLM's own server reads it from.
KEY = "VLLM_API_KEY"


def ask_server(
    golden: Golden,
    url: str,
    *,
    model: str | None = None,
    task: str | None = None,
    logprobs: int = 20,
    timeout: float = 60.0,
) -> list[Answer]:
    """Send every golden prompt, and read the next token's log-probabilities, and what is completed greedily.

    Where whole label sequences count, every prompt also goes with each label behind it, and the server is
    asked to echo it with log-probabilities. An answer has none of these where it does not, or where they
    do not fit: the first label token's must be what the prompt alone was answered with.

    Prompts go as token ids; to a server that refuses these (llama-cpp-python's), as text, which it
    then encodes itself.

    Args:
        golden: what to ask.
        url: of the server, with or without ``/v1``.
        model: name that the server gives it; default: the first it lists.
        task: to be answered under, by a server of the base model that runs the vLLM plugin.
        logprobs: how many of the most probable tokens to ask for.
        timeout: seconds to wait for an answer.

    Raises:
        I2CLError: if the server cannot be reached, refuses, or tells no log-probabilities.
    """
    if not url.startswith(("http://", "https://")):
        raise I2CLError(f"{url!r} is no address of a server: give one such as http://localhost:8000")
    root = url.rstrip("/").removesuffix("/completions").removesuffix("/v1") + "/v1"
    server = _Server(golden, root, model or _first_model(root, timeout), task, logprobs, timeout)
    try:
        return server.answers()
    except _RefusedError as refusal:
        if any(prompt.query is None for prompt in golden.prompts):
            raise
        try:
            return server.answers(as_text=True)
        except _RefusedError:
            raise refusal from None


@dataclass(frozen=True)
class _Server:
    """One server and what it is asked about."""

    golden: Golden
    root: str
    name: str
    task: str | None
    logprobs: int
    timeout: float

    def complete(self, prompt: list[int] | str | None, **options: Any) -> Any:
        body: dict[str, Any] = {"model": self.name, "prompt": prompt, "max_tokens": 1}
        body |= {"logprobs": self.logprobs, "temperature": 0}
        task = {} if self.task is None else {"vllm_xargs": {"i2cl": self.task}}
        return _call(f"{self.root}/completions", body | task | options, self.timeout)

    def answers(self, *, as_text: bool = False) -> list[Answer]:
        """To all prompts. Greedy decoding is asked where whole labels cannot be compared."""
        golden, answers = self.golden, []
        queries = [prompt.query if as_text else prompt.ids for prompt in golden.prompts]
        labels: Any = golden.sequence_texts if as_text else golden.sequences
        for prompt, query in zip(golden.prompts, queries, strict=True):
            first = self.complete(query)
            answer = _answer(golden, first)
            if labels:
                answers.append(replace(answer, whole=self.whole(prompt, query, labels, answer)))
            else:
                answers.append(replace(answer, said=self.said(query, first)))
        if not labels:
            return answers
        if all(answer.whole for answer in answers):
            return [by_whole_labels(golden, answer) for answer in answers]
        pairs = zip(answers, queries, strict=True)  # what fits for some prompts may do so by chance
        return [replace(answer, whole=(), said=self.said(query)) for answer, query in pairs]

    def whole(self, prompt: GoldenPrompt, query: Any, labels: Any, answer: Answer) -> tuple[float, ...]:
        """Log-probability of each label's sequence; none where the server does not echo them."""
        try:
            echoes = [self.complete(query + label, echo=True, logprobs=1) for label in labels]
        except _RefusedError:
            return ()
        return _whole(self.golden, prompt, answer, echoes)

    def said(self, query: list[int] | str | None, first: Any = None) -> str:
        """The label that greedy decoding says; ``first`` is the reply of one token, where there is one."""
        golden = self.golden
        more = sent_to_servers(golden)
        if more or golden.length > 1 or first is None:
            first = self.complete(query, max_tokens=golden.length, logprobs=None, **more)
        try:
            return golden.said_in(first["choices"][0]["text"], whole=bool(golden.sequences))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise I2CLError(f"{self.root}/completions answers no text: is it a completions server?") from None


class _RefusedError(I2CLError):
    """The server answered, but not with a completion."""


def _answer(golden: Golden, reply: Any) -> Answer:
    try:
        values = _first_token(reply["choices"][0]["logprobs"])
        floor = min(values.values())
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        cure = "start it so that completions answer logprobs"
        raise I2CLError(f"the server tells no log-probabilities: {cure}") from None
    labels = []
    for token, text in zip(golden.label_ids, golden.label_texts, strict=True):
        keys: tuple[int | str, ...] = (token, f"token_id:{token}", text)
        labels.append(next((values[key] for key in keys if key in values), None))
    return Answer(tuple(labels), floor=floor)


def _whole(golden: Golden, prompt: GoldenPrompt, answer: Answer, echoes: list[Any]) -> tuple[float, ...]:
    """Log-probability of each label's sequence, from replies that echo it; none if one does not fit."""
    sums = []
    for ids, first, reply in zip(golden.sequences, answer.labels, echoes, strict=True):
        try:
            listed, usage = reply["choices"][0]["logprobs"]["token_logprobs"], reply["usage"]
            fits = usage["prompt_tokens"] == len(prompt.ids) + len(ids)
            end = len(listed) - usage["completion_tokens"]  # counted from there: some leave out BOS in front
            values = [float(value) for value in listed[end - len(ids) : end]]
        except (KeyError, IndexError, TypeError, ValueError):
            return ()
        if not fits or len(values) < len(ids):
            return ()
        if first is not None and not math.isclose(values[0], first, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return ()
        sums.append(math.fsum(values))
    return tuple(sums)


def _first_token(logprobs: Any) -> dict[int | str, float]:
    """Log-probabilities of the first new token, by text (OpenAI, vLLM) or by id (llama.cpp)."""
    if "content" in logprobs:
        return {entry["id"]: float(entry["logprob"]) for entry in logprobs["content"][0]["top_logprobs"]}
    return {text: float(value) for text, value in logprobs["top_logprobs"][0].items()}


def _first_model(root: str, timeout: float) -> str:
    listed = _call(f"{root}/models", None, timeout)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise I2CLError(f"{root}/models lists no model: name it with --model-name") from None


def _call(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data, headers)  # noqa: S310 - http or https
    try:
        with urlopen(request, timeout=timeout) as reply:  # noqa: S310
            return json.load(reply)
    except HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise _RefusedError(f"{url} answers {error.code} ({' '.join(said.split())})") from None
    except (OSError, HTTPException) as error:
        raise I2CLError(f"cannot reach {url} ({error}): is the server running?") from None
    except (ValueError, RecursionError):
        raise I2CLError(f"{url} does not answer JSON: is it a completions server?") from None
