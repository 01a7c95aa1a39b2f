"""OpenAI's chat completions API: the text is the user message, the answer is the task's label.

Source: https://platform.openai.com/docs/api-reference/chat.
"""

import json
import math
import secrets
import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from i2cl.interfaces.server.client import DIGEST_HEADER
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Answer, Service

MIN_PROBABILITY = 1e-38  # keeps log probabilities finite, because JSON has no infinity
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def add_chat(app: FastAPI, service: Service) -> None:
    """Add the routes of OpenAI's API to the app."""

    @app.post(
        "/v1/chat/completions",
        summary="Classify the user message, for clients of OpenAI's chat API",
        response_model=None,
        responses=_STREAM,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def chat(body: schemas.Chat, timeout: schemas.Timeout = None) -> Response:
        answer = await service.classify(body.model, [_text_of(body)], timeout)
        if answer.entry.thresholds is not None:
            problem = f"{body.model!r} is a multi-label task, and the answer of a chat is one label"
            raise _unsupported(problem, "send the text to /v1/classify", "model")
        headers = {DIGEST_HEADER: answer.entry.digest}
        head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": answer.entry.digest[:16],
        }
        label, logprobs, usage = _choice(answer, body.top_logprobs)
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.get("include_usage"))
            chunks = _chunks(head, label, logprobs, usage if with_usage else None)
            content = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            return Response(content, media_type="text/event-stream", headers=headers)
        message = {"role": "assistant", "content": label, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
        reply = head | {"object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(reply, headers=headers)


def _choice(answer: Answer, top_logprobs: int | None) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return the most probable label, the log probabilities of the labels, and the token counts."""
    pairs = zip(answer.entry.labels, answer.probabilities[0], strict=True)
    ranked = [
        {"token": label, "logprob": math.log(max(probability, MIN_PROBABILITY)), "bytes": [*label.encode()]}
        for label, probability in sorted(pairs, key=lambda pair: -pair[1])
    ]
    count = schemas.MAX_TOP_LOGPROBS if top_logprobs is None else top_logprobs
    logprobs = {"content": [{**ranked[0], "top_logprobs": ranked[:count]}], "refusal": None}
    tokens = sum(answer.tokens)
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    return str(ranked[0]["token"]), logprobs, usage


def _chunks(
    head: dict[str, Any], label: str, logprobs: dict[str, Any], usage: dict[str, int] | None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream: the whole label, the end, and ``usage`` unless it is None."""
    head = head | {"object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": label}
    yield head | {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}
    yield head | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    if usage is not None:
        yield head | {"choices": [], "usage": usage}


def _text_of(body: schemas.Chat) -> str:
    """Return the text to classify: the content of the only user message.

    System and developer messages are ignored, because a task has its own prompt. Raises RefusalError (400) if
    the request asks for anything but the label of one text.
    """
    response_type = (body.response_format or {}).get("type", "text")
    for field, what, unsupported in (
        ("n", f"n={body.n}", body.n not in {None, 1}),
        ("tools", "tools", body.tools),
        ("response_format", f"response_format {response_type!r}", response_type != "text"),
        ("modalities", "modalities other than text", set(body.modalities or ()) - {"text"}),
    ):
        if unsupported:
            message = f"{what} is not supported, because the answer is one label"
            raise _unsupported(message, f"leave {field} out", field)
    hint, roles = "send one user message with the text", [message.role for message in body.messages]
    if others := [role for role in roles if role not in {"system", "developer", "user"}]:
        raise _unsupported(f"messages with role {others[0]!r} are not supported", hint, "messages")
    if (count := roles.count("user")) != 1:
        problem = f"the request has {count} user messages, but one text is classified at a time"
        raise _unsupported(problem, hint, "messages")
    content = body.messages[roles.index("user")].content
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            problem = f"content parts of type {part.type!r} are not supported"
            if part.type == "text":
                problem = "a content part of type 'text' has no text"
            raise _unsupported(problem, 'send parts such as {"type": "text", "text": "..."}', "messages")
    return "\n".join(part.text or "" for part in content)


def _unsupported(message: str, hint: str, param: str) -> RefusalError:
    return RefusalError(400, "unsupported", message, hint, param=param)
