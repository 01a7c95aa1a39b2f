"""A task as clients of OpenAI's interface ask for a text: the answer is one of its labels."""

import math
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Answer, Service, answered, new_id

MOST_LOGPROBS = 20


def router(service: Service) -> APIRouter:
    """The two routes."""
    routes = APIRouter()

    @routes.post("/v1/completions", summary="The label of a text, as a completion")
    async def completions(
        body: schemas.Completion, request: Request, response: Response, timeout: schemas.Timeout = None
    ) -> dict[str, Any]:
        _require_label_alone(body)
        for name in ("echo", "suffix"):
            if getattr(body, name):
                raise _refused(f"{name} asks for more than the label", f"leave {name} out")
        if body.best_of not in {None, 1}:
            raise _refused("best_of asks for more than the label", "leave best_of out")
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        answer = await answered(service, request, body.model, texts, timeout)
        response.headers["X-Task-Digest"] = answer.entry.digest
        choices = [
            {
                "index": row,
                "text": answer.label(row),
                "finish_reason": "stop",
                "logprobs": _of_completion(answer, row, body.logprobs),
            }
            for row in range(len(texts))
        ]
        return _told("text_completion", "cmpl", body.model, choices, answer)

    @routes.post("/v1/chat/completions", summary="The label of a text, as an answer in a chat")
    async def chat(
        body: schemas.Chat, request: Request, response: Response, timeout: schemas.Timeout = None
    ) -> dict[str, Any]:
        _require_label_alone(body)
        for name in ("tools", "response_format"):
            if getattr(body, name):
                raise _refused(f"{name} asks for more than the label", f"leave {name} out")
        if len(body.messages) != 1 or body.messages[0].role != "user":
            raise _refused("a task has a prompt of its own", "send one message, the user's, with the text")
        content = body.messages[0].content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        answer = await answered(service, request, body.model, [text], timeout)
        response.headers["X-Task-Digest"] = answer.entry.digest
        message = {"role": "assistant", "content": answer.label(0), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop",
            "logprobs": _of_chat(answer, body.top_logprobs),
        }
        return _told("chat.completion", "chatcmpl", body.model, [choice], answer)

    return routes


def _require_label_alone(body: schemas.Ignored) -> None:
    if body.stream:
        raise _refused("a label does not come piece by piece", "leave stream out")
    if body.n not in {None, 1}:
        raise _refused("a text has one label", "leave n out")


def _refused(why: str, cure: str) -> RefusalError:
    return RefusalError(400, "label_alone", f"{why}, and a label is all that is answered: {cure}")


def _ranked(answer: Answer, row: int, most: int | None) -> list[tuple[str, float]]:
    """Labels with their log-probabilities, the best first."""
    pairs = [
        (label, math.log(max(probability, 1e-38)))
        for label, probability in zip(answer.entry.labels, answer.probabilities[row], strict=True)
    ]
    most = MOST_LOGPROBS if most is None else min(most, MOST_LOGPROBS)
    return sorted(pairs, key=lambda pair: -pair[1])[:most]


def _of_completion(answer: Answer, row: int, most: int | None) -> dict[str, Any]:
    ((label, value),) = _ranked(answer, row, 1)
    return {
        "tokens": [label],
        "token_logprobs": [value],
        "top_logprobs": [dict(_ranked(answer, row, most))],
        "text_offset": [0],
    }


def _of_chat(answer: Answer, most: int | None) -> dict[str, Any]:
    ranked = [
        {"token": label, "logprob": value, "bytes": list(label.encode())}
        for label, value in _ranked(answer, 0, None)
    ]
    top = ranked if most is None else ranked[:most]
    return {"content": [{**ranked[0], "top_logprobs": top}], "refusal": None}


def _told(
    kind: str, prefix: str, model: str, choices: list[dict[str, Any]], answer: Answer
) -> dict[str, Any]:
    read = sum(answer.tokens)
    usage = {"prompt_tokens": read, "completion_tokens": len(choices), "total_tokens": read + len(choices)}
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": answer.entry.digest[:16],
        "choices": choices,
        "usage": usage,
    }
