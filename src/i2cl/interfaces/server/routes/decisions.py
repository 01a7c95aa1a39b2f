"""Routes of the decision APIs: OpenAI's ``/v1/decisions`` and vLLM's ``/v1/systemone``."""

from fastapi import FastAPI, Request, Response

from i2cl.interfaces.decisions import (
    DECISIONS,
    SYSTEMONE,
    DecisionRequest,
    DecisionResponse,
    Diagnostics,
    SystemoneRequest,
    SystemoneResponse,
)
from i2cl.interfaces.server.decisions import DecisionMaker
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.service import Service, disconnection


def add_decisions(app: FastAPI, service: Service) -> None:
    """Add the routes of both APIs."""
    maker = DecisionMaker(service)

    async def answer(
        body: DecisionRequest | SystemoneRequest, request: Request, timeout: float | None
    ) -> Response:
        """Answer a request. The response is serialized here; FastAPI would also validate it again."""
        text, questions = body.parse()
        model = body.model or service.base
        decisions, tokens = await maker.decide(
            model, text, questions, timeout=timeout, disconnected=disconnection(request)
        )
        pairs = [*zip(questions, decisions, strict=True)]
        answers = [body.answer(question, decision) for question, decision in pairs]
        diagnostics = [Diagnostics.of(question, decision) for question, decision in pairs]
        response = body.respond(model, questions, answers, diagnostics, tokens)
        return Response(response.model_dump_json(), media_type=schemas.JSON)

    @app.post(
        DECISIONS,
        summary="Answer questions about a text, for clients of OpenAI's decisions API",
        response_model=DecisionResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def decisions(body: DecisionRequest, request: Request, timeout: schemas.Timeout = None) -> Response:
        return await answer(body, request, timeout)

    @app.post(
        SYSTEMONE,
        summary="Answer questions about a text, for clients of vLLM's decisions API",
        response_model=SystemoneResponse,
    )
    @policy("read", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def systemone(
        body: SystemoneRequest, request: Request, timeout: schemas.Timeout = None
    ) -> Response:
        return await answer(body, request, timeout)
