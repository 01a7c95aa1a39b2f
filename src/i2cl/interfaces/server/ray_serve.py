"""The server on many machines: one deployment of Ray Serve, whose replicas have a model and a batcher each.

Source: https://docs.ray.io/en/latest/serve/index.html. Replicas read a folder of tasks that all machines can
read and that one `i2cl serve` writes; a name means the same task on all of them as soon as it is written.

    from ray import serve
    serve.run(deployment("reference", "tasks", replicas=2))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from i2cl.errors import needs
from i2cl.models.decoder import Decoder


class Replica:
    """One model that answers: over HTTP at the addresses of `i2cl serve`, or through a handle."""

    def __init__(
        self, model: str, tasks: str, options: Mapping[str, Any], token_file: str | None = None
    ) -> None:
        """See `deployment`. Raises I2CLError on a file without tokens, or a folder without tasks."""
        from i2cl.interfaces.server.app import make_app
        from i2cl.interfaces.server.guard import Access, read_tokens
        from i2cl.interfaces.server.service import Service

        tokens = {} if token_file is None else read_tokens(Path(token_file))
        self._service = Service(Decoder.from_pretrained(model, **options), Path(tasks), read_only=True)
        self._app = make_app(self._service, Access(tokens), page=False)

    async def classify(self, task: str, texts: list[str], timeout: float | None = None) -> dict[str, Any]:
        """The labels of texts: ``labels``, their ``probabilities`` for each text, the task's ``digest``.
        They have to begin within ``timeout`` seconds, by default those of a request. Raises I2CLError on an
        unknown task, or texts that cannot be used.
        """
        limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        answer = await self._service.classify(task, texts, **limits)
        assert answer is not None  # noqa: S101 - nobody goes who was not watched
        entry = answer.entry
        return {"labels": list(entry.labels), "probabilities": answer.probabilities, "digest": entry.digest}

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette's."""
        from starlette.responses import Response

        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        await self._app(dict(request.scope), request.receive, send)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        reply = Response(body, messages[0]["status"])
        reply.raw_headers = list(messages[0]["headers"])
        return reply

    def check_health(self) -> None:
        """Let Ray replace a replica whose model does not run any more. Raises RuntimeError if that is so."""
        if not self._service.ready:
            raise RuntimeError("the model's thread has ended")


def deployment(
    model: str,
    tasks: str | Path,
    *,
    replicas: int = 1,
    token_file: str | Path | None = None,
    actor: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An application for ``serve.run``: so many replicas, each with the whole model.

    ``model`` and ``options``: see `i2cl.Decoder.from_pretrained`; ``tasks``: folder that `i2cl serve --tasks`
    has written, as all machines see it; ``token_file``: as `i2cl serve --token-file` has it, where all
    machines can read it; ``actor``: what each takes, such as ``{"num_gpus": 1}``; default: one core. Without
    a token file everybody who reaches Ray's proxy may ask; calls through a handle need no token. Raises
    I2CLError if the package ray, or what Ray Serve needs, is lacking.
    """
    needs("a deployment of Ray Serve", "ray", "ray", "starlette")
    needs("a deployment of Ray Serve", "serve", "fastapi", "prometheus_client")
    from ray import serve

    made: Any = serve.deployment(Replica)
    made = made.options(
        num_replicas=replicas, ray_actor_options=dict(actor or {"num_cpus": 1}), max_ongoing_requests=256
    )
    tokens = None if token_file is None else str(Path(token_file).resolve())
    return made.bind(model, str(Path(tasks).resolve()), options, tokens)
