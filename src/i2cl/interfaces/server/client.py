r"""Clients of `i2cl serve`: `Client`, and `AsyncClient` with the same methods as coroutines.

with Client("http://127.0.0.1:8000", token=...) as client:
    job = client.fit("films", examples, "Review: {text}\nSentiment: {label}")
    client.wait(job)
    client.classify("films", ["a warm film"])
"""

import asyncio
import io
import json
import tarfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlsplit

from i2cl.errors import I2CLError, require_packages

UNKNOWN = "unknown"  # code of an error response of a proxy instead of the server
DIGEST_HEADER = "X-I2CL-Digest"
JOBS_PER_PAGE = 1000

LOOPBACK_HOSTS = {"127.0.0.1", "::1", "localhost"}

P = ParamSpec("P")
T = TypeVar("T")


class ServerError(I2CLError):
    """An error of the server, with its HTTP ``status`` (0 if it cannot be reached) and ``code``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Prediction:
    """The answer for one text."""

    label: str  # the most probable label, empty below the minimum confidence; several are joined by ";"
    probabilities: dict[str, float]  # by label
    digest: str  # of the task's version
    labels: tuple[str, ...] = ()  # all labels, in a multi-label task; else the label, if there is one


class FitOptions(TypedDict, total=False):
    """Optional fields of ``POST /v1/tasks``, see /openapi.json."""

    labels: Sequence[str] | None
    text_column: str
    label_column: str
    label_separator: str | None
    label_columns: Sequence[str]
    test: Sequence[Mapping[str, Any]]
    instruction: str | None
    chat: bool
    shots: int | None
    seed: int
    method: str | None
    experts: Sequence[str] | None
    recipe: str | None
    settings: Mapping[str, str | int | float | bool]
    evaluate: int


class AsyncClient:
    """Client of a server for coroutines. Close it with `aclose`, or use it in an ``async with`` statement."""

    _HTTPX_CLASS = "AsyncClient"

    def __init__(
        self, url: str, *, token: str | None = None, retries: int = 5, timeout: float = 120.0
    ) -> None:
        """Set up a client. It connects with its first request.

        Args:
            url: address of the server, such as ``http://127.0.0.1:8000``.
            token: a token of the server's token file.
            retries: maximum number of retries if the server is busy or the connection is lost. Requests that
                start a job or remove something are only repeated if they had no effect.
            timeout: seconds to wait for a response.

        Raises:
            I2CLError: on an address without http:// or https://, or if httpx2 is not installed.
        """
        require_packages("the client", "serve", "httpx2")
        import httpx2 as httpx

        try:
            valid = urlsplit(url).scheme in {"http", "https"} and bool(httpx.URL(url).host)
        except (httpx.InvalidURL, ValueError):
            valid = False
        if not valid:
            raise I2CLError(f"{url!r} is not a valid server URL: begin it with http:// or https://")
        self._url, self._retries = url.rstrip("/"), retries
        self._token, self._timeout = token, timeout
        # A kept-alive connection may break when it is reused, whether or not the request was sent. So
        # requests that must not be sent twice use a client without keep-alive.
        self._http = self._connect(keep_alive=True)
        self._once = self._connect(keep_alive=False)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._once.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def classify(
        self, task: str, texts: Sequence[str], *, min_confidence: float | None = None
    ) -> list[Prediction]:
        """Classify texts. The label is empty if its probability is below ``min_confidence``.

        Raises I2CLError if ``texts`` is a single string.
        """
        if isinstance(texts, str):
            raise I2CLError("texts is one string: give a list of texts")
        body = {"model": task, "input": list(texts), "min_confidence": min_confidence}
        response = await self._send("POST", "/v1/classify", _json(body))
        reply, digest = response.json(), response.headers.get(DIGEST_HEADER, "")
        predictions = []
        for item in reply["data"]:
            probabilities = dict(zip(reply["labels"], item["probs"], strict=True))
            predictions.append(Prediction(item["label"], probabilities, digest, tuple(item["labels"])))
        return predictions

    async def tasks(self) -> list[dict[str, Any]]:
        """List all tasks: ``id``, ``digest``, ``created``, ``labels``, ``source``."""
        return list((await self._send("GET", "/v1/tasks")).json()["data"])

    async def fit(
        self,
        name: str,
        examples: Sequence[Mapping[str, Any]],
        template: str | None = None,
        **options: Unpack[FitOptions],
    ) -> str:
        """Start a fit, and return its job's id.

        Args:
            name: name of the task.
            examples: rows with ``text`` and ``label``.
            template: with ``{text}`` and ``{label}``; default: that of `i2cl fit`.
            options: other fields of the request; see `FitOptions`.

        Raises:
            ServerError: naming invalid rows.
        """
        rows = [dict(row) for row in examples]
        template_field = {} if template is None else {"template": template}
        body = _json({"name": name, "examples": rows, **template_field, **options})
        return str((await self._send("POST", "/v1/tasks", body)).json()["id"])

    async def upload(self, name: str, folder: str | Path) -> str:
        """Upload a task folder, and return its digest. Raises I2CLError if it is not a task folder,
        ServerError if the server's model cannot use it.
        """
        path = f"/v1/tasks/{quote(name)}"
        response = await self._send("PUT", path, _tar(Path(folder)), "application/x-tar")
        return str(response.json()["digest"])

    async def delete(self, name: str) -> None:
        """Remove a task. Raises ServerError if there is no such task, or if it is a folder of the server."""
        await self._send("DELETE", f"/v1/tasks/{quote(name)}")

    async def feedback(self, task: str, text: str, label: str) -> None:
        """Correct the answer for a text: it joins the task's labelling project. Raises ServerError if the
        task does not have the label.
        """
        await self._send("POST", "/v1/feedback", _json({"task": task, "text": text, "label": label}))

    async def batch(self, lines: Sequence[Mapping[str, Any]], model: str | None = None) -> str:
        """Start to classify lines (``input``, ``model``, ``custom_id``), and return the job's id. Raises
        ServerError, naming invalid lines.
        """
        body = b"".join(_json(dict(line)) + b"\n" for line in lines)
        params = {} if model is None else {"model": model}
        response = await self._send("POST", "/v1/batches", body, "application/jsonl", params)
        return str(response.json()["id"])

    async def answers(self, job: str) -> list[dict[str, Any]]:
        """Return the answers of a batch job, in the order of its lines, each with the ``labels`` of its
        ``probs``. Raises ServerError if it has not finished.
        """
        content = (await self._send("GET", f"/v1/batches/{quote(job)}")).content
        lines = [json.loads(line) for line in content.splitlines()]
        labels = (await self.job(job))["last"]["labels"]  # by task; sent once instead of on every line
        return [line | {"labels": labels[line["model"]]} if "probs" in line else line for line in lines]

    async def jobs(self) -> list[dict[str, Any]]:
        """List all jobs, newest first."""
        jobs: list[dict[str, Any]] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            params = {"limit": JOBS_PER_PAGE} | ({"after": jobs[-1]["id"]} if jobs else {})
            page = (await self._send("GET", "/v1/jobs", params=params)).json()
            jobs += page["data"]
        return jobs

    async def job(self, job: str) -> dict[str, Any]:
        """Return the status of a job."""
        return dict((await self._send("GET", f"/v1/jobs/{quote(job)}")).json())

    async def cancel(self, job: str) -> dict[str, Any]:
        """Cancel a job, and return its status. Has no effect on a finished job."""
        return dict((await self._send("POST", f"/v1/jobs/{quote(job)}/cancel")).json())

    async def delete_job(self, job: str) -> None:
        """Remove a finished job and its answers. Raises ServerError if it has not finished."""
        await self._send("DELETE", f"/v1/jobs/{quote(job)}")

    async def wait(self, job: str, poll: float = 0.5) -> dict[str, Any]:
        """Wait until a job has finished, and return its last event. Raises ServerError if it failed or was
        cancelled; ``poll``: seconds between two requests.
        """
        while (status := await self.job(job))["status"] not in {"done", "failed", "cancelled"}:
            await self._sleep(poll)
        last: dict[str, Any] = status["last"]
        if status["status"] == "cancelled":
            raise ServerError(0, "cancelled", f"job {job} was cancelled: start it again")
        if status["status"] == "failed":
            raise ServerError(0, last["error"]["code"], last["error"]["message"])
        return last

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str | int] | None = None,
    ) -> Any:
        """Send a request and return the httpx response. Repeats it if that is safe; raises ServerError."""
        import httpx2 as httpx

        idempotent = method in {"GET", "PUT"} or path.endswith(("/classify", "/cancel", "/feedback"))
        http = self._http if idempotent else self._once
        headers = {} if body is None else {"Content-Type": content_type}
        request = http.build_request(method, path, content=body, headers=headers, params=params)
        for attempt in range(self._retries + 1):
            is_last = attempt == self._retries
            try:
                response = await self._exchange(http, request)
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if is_last or not (unsent or idempotent):
                    effect = "" if unsent or idempotent else ", and whether the request took effect"
                    reason = str(error) or type(error).__name__
                    message = f"no response from {self._url} ({reason}): check that the server runs{effect}"
                    raise ServerError(0, "unreachable", message) from None
                await self._sleep(min(2.0, 0.1 * 2**attempt))
                continue
            if response.status_code < 400:
                return response
            server_error = _error_of(response)
            if is_last or not _may_repeat(server_error, idempotent=idempotent):
                raise server_error
            await self._sleep(_retry_after(response.headers.get("Retry-After", "")))
        raise AssertionError  # the last attempt returns or raises

    def _connect(self, *, keep_alive: bool) -> Any:
        import httpx2 as httpx

        return getattr(httpx, self._HTTPX_CLASS)(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=self._timeout,
            trust_env=urlsplit(self._url).hostname not in LOOPBACK_HOSTS,  # no proxy for this machine
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20 if keep_alive else 0),
        )

    async def _exchange(self, http: Any, request: Any) -> Any:
        return await http.send(request)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _BlockingClient(AsyncClient):
    """Waits without suspending its coroutines, so that `Client` can run them without an event loop."""

    _HTTPX_CLASS = "Client"

    def close(self) -> None:
        self._http.close()
        self._once.close()

    async def _exchange(self, http: Any, request: Any) -> Any:
        return http.send(request)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[Client, P], T]":
    """Return a method of `Client` that runs a coroutine method of `AsyncClient`."""

    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            method(client._client, *args, **kwargs).send(None)  # noqa: SLF001
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError  # a coroutine of `_BlockingClient` is never suspended

    return update_wrapper(call, method)


class Client:
    """Client of a server; safe to share between threads. Close it, or use it in a ``with`` statement."""

    def __init__(
        self, url: str, *, token: str | None = None, retries: int = 5, timeout: float = 120.0
    ) -> None:
        """Set up a client; see `AsyncClient`."""
        self._client = _BlockingClient(url, token=token, retries=retries, timeout=timeout)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    classify = _blocking(AsyncClient.classify)
    tasks = _blocking(AsyncClient.tasks)
    fit = _blocking(AsyncClient.fit)
    upload = _blocking(AsyncClient.upload)
    delete = _blocking(AsyncClient.delete)
    feedback = _blocking(AsyncClient.feedback)
    batch = _blocking(AsyncClient.batch)
    answers = _blocking(AsyncClient.answers)
    jobs = _blocking(AsyncClient.jobs)
    job = _blocking(AsyncClient.job)
    cancel = _blocking(AsyncClient.cancel)
    delete_job = _blocking(AsyncClient.delete_job)
    wait = _blocking(AsyncClient.wait)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _tar(folder: Path) -> bytes:
    """Return the files of a task folder as a tar file. Raises I2CLError if one is missing."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for file in ("injection.json", "injection.safetensors"):
            try:
                tar.add(folder / file, arcname=file)
            except OSError as error:
                problem = f"{str(folder)!r} cannot be uploaded: {error.strerror} ({file})"
                raise I2CLError(f"{problem}: give a folder that `i2cl fit` wrote") from error
    return packed.getvalue()


def _error_of(response: Any) -> ServerError:
    try:
        error = response.json()["error"]
        return ServerError(response.status_code, error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        status = response.status_code
        return ServerError(status, UNKNOWN, f"the server answered with status {status}: is it i2cl serve?")


def _may_repeat(error: ServerError, *, idempotent: bool) -> bool:
    """Return whether to repeat a request after an error: it had no effect, or is idempotent."""
    if error.code != UNKNOWN or error.status == 429:
        return error.status in {429, 503}
    return error.status >= 500 and idempotent  # of a proxy: the request may have had an effect


def _retry_after(header: str) -> float:
    """Return the seconds to wait: at most a minute, and one if the header is a date or missing."""
    return min(60.0, float(header)) if header.isdecimal() else 1.0
