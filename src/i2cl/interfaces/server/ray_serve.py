"""A Ray Serve deployment: replicas on many machines, each with a model and a batcher.

Source: https://docs.ray.io/en/latest/serve/index.html. Replicas read a folder of tasks that is shared by all
machines and written by one `i2cl serve`. All replicas see a new or changed task at once.

    from ray import serve
    serve.run(deployment("reference", "tasks", replicas=2))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from i2cl.errors import require_packages
from i2cl.models.decoder import Decoder


class Replica:
    """One model, called over HTTP with the API of `i2cl serve`, or through a handle of Ray."""

    def __init__(
        self, model: str, tasks: str, options: Mapping[str, Any], token_file: str | None = None
    ) -> None:
        """Load the model and open the folder; see `deployment`. Raises I2CLError on a file without tokens, or
        a folder without tasks.
        """
        from i2cl.interfaces.server.app import make_app
        from i2cl.interfaces.server.guard import Access, read_tokens
        from i2cl.interfaces.server.service import Service

        tokens = {} if token_file is None else read_tokens(Path(token_file))
        self._service = Service(Decoder.from_pretrained(model, **options), Path(tasks), read_only=True)
        self._app = make_app(self._service, Access(tokens), page=False)

    async def classify(self, task: str, texts: list[str], timeout: float | None = None) -> dict[str, Any]:
        """Classify texts.

        Args:
            task: name of the task.
            texts: one or more.
            timeout: seconds within which the model has to start on them; default: 60.

        Returns:
            ``labels``, ``probabilities`` of these for each text, and the ``digest`` of the task's version.

        Raises:
            I2CLError: on an unknown task, or texts that cannot be classified.
        """
        answer = await self._service.classify(task, texts, timeout=timeout)
        assert answer is not None  # noqa: S101 - None only for a client that has disconnected
        entry = answer.entry
        return {"labels": list(entry.labels), "probabilities": answer.probabilities, "digest": entry.digest}

    async def __call__(self, request: Any) -> Any:
        """Answer a Starlette request."""
        from starlette.responses import Response

        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        await self._app(dict(request.scope), request.receive, send)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        response = Response(body, messages[0]["status"])
        response.raw_headers = list(messages[0]["headers"])
        return response

    def check_health(self) -> None:
        """Raise RuntimeError if the model thread has died: Ray then replaces the replica."""
        if not self._service.ready:
            raise RuntimeError("the model thread has ended")


def deployment(
    model: str,
    tasks: str | Path,
    *,
    replicas: int = 1,
    token_file: str | Path | None = None,
    actor: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Make an application for ``serve.run``. Every replica has the whole model.

    Args:
        model: see `i2cl.Decoder.from_pretrained`.
        tasks: a folder that `i2cl serve --tasks` writes, at the same path on all machines.
        replicas: number of replicas.
        token_file: as for `i2cl serve --token-file`, at the same path on all machines. Without it, everyone
            who can reach Ray's proxy has access. Calls through a handle need no token.
        actor: resources of a replica, such as ``{"num_gpus": 1}``; default: one core.
        options: other arguments of `i2cl.Decoder.from_pretrained`.

    Raises:
        I2CLError: if a package is missing.
    """
    require_packages("a deployment of Ray Serve", "ray", "ray", "starlette")
    require_packages("a deployment of Ray Serve", "serve", "fastapi", "prometheus_client")
    from ray import serve

    replica: Any = serve.deployment(Replica)
    replica = replica.options(
        num_replicas=replicas, ray_actor_options=dict(actor or {"num_cpus": 1}), max_ongoing_requests=256
    )
    tokens = None if token_file is None else str(Path(token_file).resolve())
    return replica.bind(model, str(Path(tasks).resolve()), options, tokens)
