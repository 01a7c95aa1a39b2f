"""Routes of the decision APIs: OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``."""

import json

from fastapi import FastAPI, Response

from i2cl.interfaces.decision_bodies import (
    DECISIONS,
    SYSTEMONE,
    DecisionRequest,
    DecisionResponse,
    SystemoneRequest,
    SystemoneResponse,
    result_of,
)
from i2cl.interfaces.server.decision_maker import DecisionMaker
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service


def add_decisions(app: FastAPI, service: Service) -> None:
    """Add the routes of both APIs."""
    maker = DecisionMaker(service)

    async def answer(body: DecisionRequest | SystemoneRequest, timeout: float | None) -> Response:
        text, questions = body.parse()
        model = body.model or service.base
        decisions, tokens = await maker.decide(model, text, questions, timeout)
        results = [result_of(*pair) for pair in zip(questions, decisions, strict=True)]
        response = body.respond(model, results, tokens)
        return Response(json.dumps(response), media_type=schemas.JSON)

    @app.post(
        DECISIONS,
        summary="Answer questions about a text, for clients of OpenAI's decisions API",
        response_model=DecisionResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def decisions(body: DecisionRequest, timeout: schemas.Timeout = None) -> Response:
        return await answer(body, timeout)

    @app.post(
        SYSTEMONE,
        summary="Answer questions about a text, for clients of vLLM's decisions API",
        response_model=SystemoneResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def systemone(body: SystemoneRequest, timeout: schemas.Timeout = None) -> Response:
        return await answer(body, timeout)
