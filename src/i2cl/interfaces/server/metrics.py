"""Prometheus metrics. None is labelled by task, because a server may have thousands of tasks."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("i2cl_requests", "Requests", ["route", "status"], registry=registry)
        self.refusals = Counter("i2cl_refusals", "Refused requests by reason", ["reason"], registry=registry)
        self._rows = Histogram("i2cl_batch_rows", "Rows per batch", buckets=_SIZES, registry=registry)
        self._tasks = Histogram("i2cl_batch_tasks", "Tasks per batch", buckets=_SIZES, registry=registry)
        self._running = Histogram(
            "i2cl_running_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        queued = "Time of a request in the queue"
        self._waiting = Histogram("i2cl_waiting_seconds", queued, buckets=_SECONDS, registry=registry)

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge; ``read`` is called whenever the metrics are exported."""
        Gauge(name, help_text, registry=self._registry).set_function(read)

    def batch(self, *, rows: int, tasks: int, seconds: float, waited: Sequence[float]) -> None:
        """Record a batch; ``waited``: seconds that each of its requests was queued."""
        self._rows.observe(rows)
        self._tasks.observe(tasks)
        self._running.observe(seconds)
        for queued in waited:
            self._waiting.observe(queued)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
