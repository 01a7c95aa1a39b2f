"""A task as clients of OpenAI's interface ask for an answer in a chat: it is one of the task's labels."""

import math
import secrets
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import DIGEST_HEADER, Service, answer_request


def add_chat(app: FastAPI, service: Service) -> None:
    """The route."""

    @app.post("/v1/chat/completions", summary="The label of a text, as an answer in a chat")
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def chat(
        body: schemas.Chat, request: Request, response: Response, timeout: schemas.Timeout = None
    ) -> dict[str, Any]:
        _require_label_alone(body)
        content = body.messages[0].content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        answer = await answer_request(service, request, body.model, text, timeout)
        response.headers[DIGEST_HEADER] = answer.entry.digest
        pairs = zip(answer.entry.labels, answer.probabilities[0], strict=True)
        ranked = [
            {"token": label, "logprob": math.log(max(share, 1e-38)), "bytes": list(label.encode())}
            for label, share in sorted(pairs, key=lambda pair: -pair[1])
        ]
        most = min(20, 20 if body.top_logprobs is None else body.top_logprobs)
        tokens = sum(answer.tokens)
        message = {"role": "assistant", "content": ranked[0]["token"], "refusal": None}
        logprobs = {"content": [{**ranked[0], "top_logprobs": ranked[:most]}], "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": answer.entry.digest[:16],
            "choices": [choice],
            "usage": {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1},
        }


def _require_label_alone(body: schemas.Chat) -> None:
    alone = [message.role for message in body.messages] == ["user"]
    for wrong, why, cure in (
        (body.stream, "a label does not come piece by piece", "leave stream out"),
        (body.n not in {None, 1}, "a text has one label", "leave n out"),
        (body.tools, "tools asks for more than the label", "leave tools out"),
        (body.response_format, "response_format asks for more than the label", "leave response_format out"),
        (not alone, "a task has a prompt of its own", "send one message, the user's, with the text"),
    ):
        if wrong:
            raise RefusalError(400, "label_alone", f"{why}, and a label is all that is answered: {cure}")
