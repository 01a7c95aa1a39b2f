r"""A client of `i2cl serve` without packages of its own: `Client`, and `AsyncClient` with the same methods.

client = Client("http://127.0.0.1:8000", token=...)
job = client.fit("films", examples, "Review: {text}\nSentiment: {label}")
client.wait(job)
client.classify("films", ["a warm film"])
"""

import asyncio
import http.client
import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from i2cl.errors import I2CLError

# What is not the server's own answer: that of a proxy, such as Ray Serve's for a replica that was killed.
UNKNOWN = "unknown"


class ServerError(I2CLError):
    """What the server refused: its ``status`` of HTTP, 0 where it cannot be reached, and its ``code``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Prediction:
    """The answer for one text."""

    label: str  # the most probable one
    probabilities: dict[str, float]  # of every label
    digest: str  # of the task's version that answered


class Client:
    """Asks a server; safe to share between threads, which have a connection each."""

    def __init__(
        self, url: str, *, token: str | None = None, retries: int = 5, timeout: float = 120.0
    ) -> None:
        """Say where the server is; it is not asked yet.

        ``url``: such as ``http://127.0.0.1:8000``; ``token``: of the server's token file; ``retries``: how
        often a request is sent again that was refused for now, or that a server lost, unless it begins a fit
        or a file's job or removes something; ``timeout``: seconds for which an answer is waited for. Raises
        I2CLError on an address without http:// or https://.
        """
        self._url = urlsplit(url.rstrip("/"))
        if self._url.scheme not in {"http", "https"}:
            raise I2CLError(f"{url!r} is no address of a server: begin it with http:// or https://")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._retries, self._timeout = retries, timeout
        self._own = threading.local()

    def classify(
        self, task: str, texts: Sequence[str], *, min_confidence: float | None = None
    ) -> list[Prediction]:
        """The labels of texts; empty where the highest probability is below ``min_confidence``. Raises
        I2CLError on a string in place of a list.
        """
        if isinstance(texts, str):
            raise I2CLError("texts is one string: give a list of texts")
        more = {} if min_confidence is None else {"min_confidence": min_confidence}
        reply, headers = self._asked("POST", "/v1/classify", {"model": task, "input": list(texts), **more})
        labels, digest = reply["labels"], str(headers["x-task-digest"] or "")
        return [
            Prediction(one["label"], dict(zip(labels, one["probs"], strict=True)), digest)
            for one in reply["data"]
        ]

    def tasks(self) -> list[dict[str, Any]]:
        """Every task: ``id``, ``digest``, ``created``, ``labels``."""
        return list(self._asked("GET", "/v1/tasks")[0]["data"])

    def fit(self, name: str, examples: Sequence[Mapping[str, str]], template: str, **options: Any) -> str:
        """Begin a fit, and return its job's id. Raises ServerError, naming rows that cannot be used.

        ``name``: of the task; ``examples``: each with its ``text`` and ``label``; ``template``: with
        ``{text}`` and ``{label}``; ``options``: other fields of the request, see /openapi.json.
        """
        body = {"name": name, "examples": [dict(row) for row in examples], "template": template, **options}
        return str(self._asked("POST", "/v1/tasks", body)[0]["id"])

    def upload(self, name: str, folder: str | Path) -> str:
        """Send an artefact's folder; its digest. Raises I2CLError on a folder that is none, ServerError if it
        is none of the server's model.
        """
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for file in ("injection.json", "injection.safetensors"):
                try:
                    tar.add(Path(folder) / file, arcname=file)
                except OSError as error:
                    why = f"{str(folder)!r} cannot be sent: {error.strerror} ({file})"
                    raise I2CLError(f"{why}: give a folder that `i2cl fit` wrote") from error
        path, body = f"/v1/tasks/{quote(name)}", packed.getvalue()
        return str(self._asked("PUT", path, body, "application/x-tar")[0]["digest"])

    def delete(self, name: str) -> None:
        """Remove a task. Raises ServerError if there is none."""
        self._asked("DELETE", f"/v1/tasks/{quote(name)}")

    def batch(self, lines: Sequence[Mapping[str, Any]], model: str | None = None) -> str:
        """Begin to classify a file's lines (``input``, ``model``, ``custom_id``), and return its job's id.
        Raises ServerError, naming lines that cannot be used.
        """
        body = b"".join(json.dumps(dict(line)).encode() + b"\n" for line in lines)
        query = f"?{urlencode({'model': model})}" if model is not None else ""
        return str(self._asked("POST", f"/v1/batches{query}", body, "application/jsonl")[0]["id"])

    def answers(self, job: str) -> list[dict[str, Any]]:
        """The answers for a file, in the order of its lines. Raises ServerError if it has not been done."""
        lines: bytes = self._asked("GET", f"/v1/batches/{quote(job)}")[0]
        return [json.loads(line) for line in lines.splitlines()]

    def jobs(self) -> list[dict[str, Any]]:
        """Fits and files, the newest first."""
        return list(self._asked("GET", "/v1/jobs")[0]["data"])

    def job(self, job: str) -> dict[str, Any]:
        """Where a job stands."""
        return dict(self._asked("GET", f"/v1/jobs/{quote(job)}")[0])

    def cancel(self, job: str) -> None:
        """End a job, or remove one that has ended."""
        self._asked("DELETE", f"/v1/jobs/{quote(job)}")

    def wait(self, job: str, look: float = 0.5) -> dict[str, Any]:
        """Wait for a job's end; its last event. Raises ServerError if it failed or was cancelled."""
        while (record := self.job(job))["status"] not in {"done", "failed", "cancelled"}:
            time.sleep(look)
        last: dict[str, Any] = record["last"]
        if record["status"] != "done":
            cancelled = {"code": "cancelled", "message": f"job {job} was cancelled: begin it anew"}
            error = last.get("error", cancelled)
            raise ServerError(0, error["code"], error["message"])
        return last

    def _asked(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[Any, Message]:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": kind} if content is not None else {})
        twice = _may_be_done_twice(method, path)
        for attempt in range(self._retries + 1):
            last, sent = attempt == self._retries, False
            try:
                connection = self._kept()
                if not twice:  # on a connection of its own: an old one may break after the request was heard
                    connection.close()
                if connection.sock is None:
                    connection.connect()
                sent = True
                connection.request(method, self._url.path + path, content, headers)
                reply = connection.getresponse()
                answer = reply.read()
            except (OSError, http.client.HTTPException) as error:
                if (kept := getattr(self._own, "connection", None)) is not None:
                    kept.close()
                if last or (sent and not twice):
                    cure = "check that it serves" + ("" if twice else ", and what it has done")
                    message = f"no answer from {self._url.geturl()} ({error}): {cure}"
                    raise ServerError(0, "unreachable", message) from None
                time.sleep(min(2.0, 0.1 * 2**attempt))
                continue
            if reply.status < 400:
                is_json = reply.headers.get_content_type() == "application/json"
                return (json.loads(answer) if is_json else answer), reply.headers
            refused = _refused(reply.status, answer)
            if last or not _again(method, path, refused):
                raise refused
            time.sleep(_pause(reply.headers.get("Retry-After", "")))
        raise AssertionError  # the last attempt returns or raises

    def _kept(self) -> http.client.HTTPConnection:
        if not hasattr(self._own, "connection"):
            kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
            self._own.connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout)
        connection: http.client.HTTPConnection = self._own.connection
        return connection


class AsyncClient:
    """`Client` for coroutines: the same methods, each to be awaited."""

    def __init__(self, url: str, **options: Any) -> None:
        """As that of `Client`."""
        self._client = Client(url, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(asyncio.to_thread, getattr(self._client, name))


def _again(method: str, path: str, refused: ServerError) -> bool:
    """Whether a request that was refused may be sent again: it has done nothing, or may be done twice."""
    if refused.code != UNKNOWN or refused.status == 429:
        return refused.status in {429, 503}
    return refused.status >= 500 and _may_be_done_twice(method, path)  # a proxy's answer tells nothing


def _may_be_done_twice(method: str, path: str) -> bool:
    return method in {"GET", "PUT"} or path == "/v1/classify"


def _pause(retry_after: str) -> float:
    """Seconds to wait: at most a minute, and one where a proxy names a date, or nothing."""
    return min(60.0, float(retry_after)) if retry_after.isdecimal() else 1.0


def _refused(status: int, body: bytes) -> ServerError:
    try:
        error = json.loads(body)["error"]
        return ServerError(status, error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return ServerError(status, UNKNOWN, f"the server answered with status {status}: is it i2cl serve?")
