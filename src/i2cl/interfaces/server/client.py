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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote, urlsplit

from i2cl.errors import I2CLError, require_packages

UNKNOWN = "unknown"  # code of an error response of a proxy instead of the server
DIGEST_HEADER = "X-I2CL-Digest"
JOBS_PER_PAGE = 1000

LOCAL = {"127.0.0.1", "::1", "localhost"}

T = TypeVar("T")
H = TypeVar("H")


class ServerError(I2CLError):
    """An error of the server, with its HTTP ``status`` (0 if it cannot be reached) and ``code``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Prediction:
    """The answer for one text."""

    label: str  # the most probable label; empty if below the minimum confidence
    probabilities: dict[str, float]  # by label
    digest: str  # of the task's version


@dataclass(frozen=True)
class _Call(Generic[T]):
    """A request, and a function that reads the httpx response to it."""

    method: str
    path: str
    read: Callable[[Any], T]
    content: bytes | None = None
    content_type: str = "application/json"
    params: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def idempotent(self) -> bool:
        """Whether the request may be sent twice."""
        harmless = self.path == "/v1/classify" or self.path.endswith("/cancel")
        return harmless or self.method in {"GET", "PUT"}

    def request(self) -> dict[str, Any]:
        """Return the arguments of httpx's ``request``."""
        headers = {} if self.content is None else {"Content-Type": self.content_type}
        return {
            "method": self.method,
            "url": self.path,
            "params": dict(self.params),
            "content": self.content,
            "headers": headers,
        }


class _Base:
    """Options and retries of both clients."""

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

    def _connect(self, kind: Callable[..., H], *, keep_alive: bool) -> H:
        """Make a client of httpx.

        A kept-alive connection may break when it is reused, whether or not the request was sent. So requests
        that must not be sent twice use a client without ``keep_alive``.
        """
        import httpx2 as httpx

        return kind(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=self._timeout,
            trust_env=urlsplit(self._url).hostname not in LOCAL,  # no proxy for this machine
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20 if keep_alive else 0),
        )

    def _attempts(self, call: _Call[T]) -> Generator[float, Any, T]:
        """Decide on retries. Yields the seconds to wait before each attempt, receives its response or error,
        and returns the result of ``call.read``. Raises ServerError.
        """
        import httpx2 as httpx

        pause = 0.0
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            outcome = yield pause
            if isinstance(outcome, Exception):
                unsent = isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
                if last or not (unsent or call.idempotent):
                    effect = "" if call.idempotent or unsent else ", and whether the request took effect"
                    why = str(outcome) or type(outcome).__name__
                    message = f"no response from {self._url} ({why}): check that the server runs{effect}"
                    raise ServerError(0, "unreachable", message) from None
                pause = min(2.0, 0.1 * 2**attempt)
                continue
            if outcome.status_code < 400:
                return call.read(outcome)
            error = _error_of(outcome)
            if last or not _retried(call, error):
                raise error
            pause = _retry_after(outcome.headers.get("Retry-After", ""))
        raise AssertionError  # the last attempt returns or raises


class Client(_Base):
    """Client of a server; safe to share between threads. Close it, or use it in a ``with`` statement."""

    def __init__(
        self, url: str, *, token: str | None = None, retries: int = 5, timeout: float = 120.0
    ) -> None:
        super().__init__(url, token=token, retries=retries, timeout=timeout)
        import httpx2 as httpx

        self._http = self._connect(httpx.Client, keep_alive=True)
        self._once = self._connect(httpx.Client, keep_alive=False)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        self._once.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def classify(
        self, task: str, texts: Sequence[str], *, min_confidence: float | None = None
    ) -> list[Prediction]:
        """Classify texts. The label is empty if its probability is below ``min_confidence``.

        Raises I2CLError if ``texts`` is a single string.
        """
        return self._send(_classify(task, texts, min_confidence))

    def tasks(self) -> list[dict[str, Any]]:
        """List all tasks: ``id``, ``digest``, ``created``, ``labels``, ``source``."""
        return self._send(_list("/v1/tasks"))

    def fit(self, name: str, examples: Sequence[Mapping[str, str]], template: str, **options: Any) -> str:
        """Start a fit, and return its job's id.

        Args:
            name: name of the task.
            examples: rows with ``text`` and ``label``.
            template: with ``{text}`` and ``{label}``.
            options: other fields of the request; see /openapi.json.

        Raises:
            ServerError: naming invalid rows.
        """
        return self._send(_fit(name, examples, template, options))

    def upload(self, name: str, folder: str | Path) -> str:
        """Upload a task folder, and return its digest. Raises I2CLError if it is not a task folder,
        ServerError if the server's model cannot use it.
        """
        return self._send(_upload(name, folder))

    def delete(self, name: str) -> None:
        """Remove a task. Raises ServerError if there is no such task, or if it is a folder of the server."""
        self._send(_Call("DELETE", f"/v1/tasks/{quote(name)}", _nothing))

    def batch(self, lines: Sequence[Mapping[str, Any]], model: str | None = None) -> str:
        """Start to classify lines (``input``, ``model``, ``custom_id``), and return the job's id. Raises
        ServerError, naming invalid lines.
        """
        return self._send(_batch(lines, model))

    def answers(self, job: str) -> list[dict[str, Any]]:
        """Return the answers of a batch job, in the order of its lines, each with the ``labels`` of its
        ``probs``. Raises ServerError if it has not finished.
        """
        lines = self._send(_answers(job))
        return _with_labels(lines, self.job(job))

    def jobs(self) -> list[dict[str, Any]]:
        """List all jobs, newest first."""
        jobs: list[dict[str, Any]] = []
        more = True
        while more:
            page, more = self._send(_jobs(jobs))
            jobs += page
        return jobs

    def job(self, job: str) -> dict[str, Any]:
        """Return the status of a job."""
        return self._send(_job(job))

    def cancel(self, job: str) -> dict[str, Any]:
        """Cancel a job, and return its status. Has no effect on a finished job."""
        return self._send(_cancel(job))

    def delete_job(self, job: str) -> None:
        """Remove a finished job and its answers. Raises ServerError if it has not finished."""
        self._send(_Call("DELETE", f"/v1/jobs/{quote(job)}", _nothing))

    def wait(self, job: str, poll: float = 0.5) -> dict[str, Any]:
        """Wait until a job has finished, and return its last event. Raises ServerError if it failed or was
        cancelled; ``poll``: seconds between two requests.
        """
        while (last := _last_event(self.job(job))) is None:
            time.sleep(poll)
        return last

    def _send(self, call: _Call[T]) -> T:
        import httpx2 as httpx

        attempts, http = self._attempts(call), self._http if call.idempotent else self._once
        pause = next(attempts)
        try:
            while True:
                time.sleep(pause)
                try:
                    outcome: Any = http.request(**call.request())
                except httpx.TransportError as error:
                    outcome = error
                pause = attempts.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class AsyncClient(_Base):
    """`Client` for coroutines. Close it with `aclose`, or use it in an ``async with`` statement."""

    def __init__(
        self, url: str, *, token: str | None = None, retries: int = 5, timeout: float = 120.0
    ) -> None:
        super().__init__(url, token=token, retries=retries, timeout=timeout)
        import httpx2 as httpx

        self._http = self._connect(httpx.AsyncClient, keep_alive=True)
        self._once = self._connect(httpx.AsyncClient, keep_alive=False)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._once.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def classify(
        self, task: str, texts: Sequence[str], *, min_confidence: float | None = None
    ) -> list[Prediction]:
        """See `Client.classify`."""
        return await self._send(_classify(task, texts, min_confidence))

    async def tasks(self) -> list[dict[str, Any]]:
        """See `Client.tasks`."""
        return await self._send(_list("/v1/tasks"))

    async def fit(
        self, name: str, examples: Sequence[Mapping[str, str]], template: str, **options: Any
    ) -> str:
        """See `Client.fit`."""
        return await self._send(_fit(name, examples, template, options))

    async def upload(self, name: str, folder: str | Path) -> str:
        """See `Client.upload`."""
        return await self._send(await asyncio.to_thread(_upload, name, folder))

    async def delete(self, name: str) -> None:
        """See `Client.delete`."""
        await self._send(_Call("DELETE", f"/v1/tasks/{quote(name)}", _nothing))

    async def batch(self, lines: Sequence[Mapping[str, Any]], model: str | None = None) -> str:
        """See `Client.batch`."""
        return await self._send(_batch(lines, model))

    async def answers(self, job: str) -> list[dict[str, Any]]:
        """See `Client.answers`."""
        lines = await self._send(_answers(job))
        return _with_labels(lines, await self.job(job))

    async def jobs(self) -> list[dict[str, Any]]:
        """See `Client.jobs`."""
        jobs: list[dict[str, Any]] = []
        more = True
        while more:
            page, more = await self._send(_jobs(jobs))
            jobs += page
        return jobs

    async def job(self, job: str) -> dict[str, Any]:
        """See `Client.job`."""
        return await self._send(_job(job))

    async def cancel(self, job: str) -> dict[str, Any]:
        """See `Client.cancel`."""
        return await self._send(_cancel(job))

    async def delete_job(self, job: str) -> None:
        """See `Client.delete_job`."""
        await self._send(_Call("DELETE", f"/v1/jobs/{quote(job)}", _nothing))

    async def wait(self, job: str, poll: float = 0.5) -> dict[str, Any]:
        """See `Client.wait`."""
        while (last := _last_event(await self.job(job))) is None:
            await asyncio.sleep(poll)
        return last

    async def _send(self, call: _Call[T]) -> T:
        import httpx2 as httpx

        attempts, http = self._attempts(call), self._http if call.idempotent else self._once
        pause = next(attempts)
        try:
            while True:
                await asyncio.sleep(pause)
                try:
                    outcome: Any = await http.request(**call.request())
                except httpx.TransportError as error:
                    outcome = error
                pause = attempts.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _nothing(_response: Any) -> None:
    """Ignore the body of a response."""


def _classify(task: str, texts: Sequence[str], min_confidence: float | None) -> _Call[list[Prediction]]:
    if isinstance(texts, str):
        raise I2CLError("texts is one string: give a list of texts")

    def read(response: Any) -> list[Prediction]:
        reply, digest = response.json(), response.headers.get(DIGEST_HEADER, "")
        return [
            Prediction(item["label"], dict(zip(reply["labels"], item["probs"], strict=True)), digest)
            for item in reply["data"]
        ]

    body: dict[str, Any] = {"model": task, "input": list(texts)}
    body |= {} if min_confidence is None else {"min_confidence": min_confidence}
    return _Call("POST", "/v1/classify", read, _json(body))


def _list(path: str) -> _Call[list[dict[str, Any]]]:
    return _Call("GET", path, lambda response: list(response.json()["data"]))


def _fit(
    name: str, examples: Sequence[Mapping[str, str]], template: str, options: Mapping[str, Any]
) -> _Call[str]:
    body = {"name": name, "examples": [dict(row) for row in examples], "template": template, **options}
    return _Call("POST", "/v1/tasks", lambda response: str(response.json()["id"]), _json(body))


def _upload(name: str, folder: str | Path) -> _Call[str]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for file in ("injection.json", "injection.safetensors"):
            try:
                tar.add(Path(folder) / file, arcname=file)
            except OSError as error:
                why = f"{str(folder)!r} cannot be uploaded: {error.strerror} ({file})"
                raise I2CLError(f"{why}: give a folder that `i2cl fit` wrote") from error
    path, content = f"/v1/tasks/{quote(name)}", packed.getvalue()
    return _Call("PUT", path, lambda response: str(response.json()["digest"]), content, "application/x-tar")


def _batch(lines: Sequence[Mapping[str, Any]], model: str | None) -> _Call[str]:
    content = b"".join(_json(dict(line)) + b"\n" for line in lines)
    params = {} if model is None else {"model": model}
    return _Call(
        "POST",
        "/v1/batches",
        lambda response: str(response.json()["id"]),
        content,
        "application/jsonl",
        params,
    )


def _answers(job: str) -> _Call[list[dict[str, Any]]]:
    def read(response: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in response.content.splitlines()]

    return _Call("GET", f"/v1/batches/{quote(job)}", read)


def _with_labels(lines: list[dict[str, Any]], job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add the labels of each line's task. The server sends them once, in the last event of the job."""
    labels = job["last"]["labels"]
    return [line | {"labels": labels[line["model"]]} if "probs" in line else line for line in lines]


def _jobs(previous: list[dict[str, Any]]) -> _Call[tuple[list[dict[str, Any]], bool]]:
    """Return the request for the page after these jobs."""
    params: dict[str, str | int] = {"limit": JOBS_PER_PAGE}
    params |= {"after": previous[-1]["id"]} if previous else {}

    def read(response: Any) -> tuple[list[dict[str, Any]], bool]:
        return response.json()["data"], response.json().get("has_more", False)

    return _Call("GET", "/v1/jobs", read, params=params)


def _job(job: str) -> _Call[dict[str, Any]]:
    return _Call("GET", f"/v1/jobs/{quote(job)}", lambda response: dict(response.json()))


def _cancel(job: str) -> _Call[dict[str, Any]]:
    return _Call("POST", f"/v1/jobs/{quote(job)}/cancel", lambda response: dict(response.json()))


def _last_event(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last event of a finished job, or None. Raises ServerError if it failed or was cancelled."""
    if job["status"] not in {"done", "failed", "cancelled"}:
        return None
    last: dict[str, Any] = job["last"]
    if job["status"] != "done":
        cancelled = {"code": "cancelled", "message": f"job {job['id']} was cancelled: start it again"}
        error = last.get("error", cancelled)
        raise ServerError(0, error["code"], error["message"])
    return last


def _retried(call: _Call[Any], error: ServerError) -> bool:
    """Return whether to repeat a request after an error: it had no effect, or is idempotent."""
    if error.code != UNKNOWN or error.status == 429:
        return error.status in {429, 503}
    return error.status >= 500 and call.idempotent  # of a proxy: the request may have had an effect


def _retry_after(header: str) -> float:
    """Return the seconds to wait: at most a minute, and one if the header is a date or missing."""
    return min(60.0, float(header)) if header.isdecimal() else 1.0


def _error_of(response: Any) -> ServerError:
    try:
        error = response.json()["error"]
        return ServerError(response.status_code, error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        status = response.status_code
        return ServerError(status, UNKNOWN, f"the server answered with status {status}: is it i2cl serve?")
