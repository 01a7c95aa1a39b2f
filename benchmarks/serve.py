"""Compare serving with direct calls: ratios of adjacent measurements, on a model with 20 ms per text.

    python benchmarks/serve.py --shape gpt2-small -o results/serve.json

Server and direct calls alternate in one process. Clients are separate processes, and the model leaves them a
core. Needs the extra ``serve``.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from i2cl.injections.pool import RowScores, TaskQuery
from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access
from i2cl.interfaces.server.process import IDLE_SECONDS, listen
from i2cl.interfaces.server.service import Service
from i2cl.models.scoring import score
from measures import paired
from tables import machine
from workload import SHAPES, Workload, random_decoder

ROWS = 64
OVERLOAD = 4
"""Request rate under overload, as a multiple of the capacity."""

SHORTER = 3
"""Factor of more and shorter rounds, for measurements of a few milliseconds on a noisy machine."""


def send(connection: HTTPConnection, task: str, text: str) -> tuple[float, int]:
    """Send a request, and return its seconds and status."""
    body = json.dumps({"model": task, "input": text}).encode()
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/classify", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
    except (OSError, HTTPException):  # the server closed an idle connection
        connection.close()
        return time.perf_counter() - started, 0
    return time.perf_counter() - started, reply.status


def client(
    port: int, connections: int, seconds: float, rate: float, tasks: int, texts: Sequence[str]
) -> None:
    """Run clients, and print seconds and status of every request; with a rate, the load is open-loop."""
    result: list[tuple[float, int]] = []
    ends = time.perf_counter() + seconds
    begun = time.perf_counter()

    def run(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port)
        draw = random.Random(number)
        turn = number
        while time.perf_counter() < ends:
            if rate:  # request number `turn` is due then
                due = begun + turn / rate
                if due > ends:
                    return
                time.sleep(max(0.0, due - time.perf_counter()))
                turn += connections
            result.append(send(connection, f"t{draw.randrange(tasks)}", draw.choice(texts)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"requests": result, "seconds": time.perf_counter() - begun}))


class Bench:
    """A server in this process, and its measurements."""

    def __init__(self, work: Workload, folder: Path, seconds: float, rounds: int) -> None:
        self.work, self.seconds, self.rounds = work, seconds, rounds
        self.decoder = work.decoder
        self.service = Service(self.decoder, folder / "tasks")
        self.put(ROWS)
        listener = listen("127.0.0.1", 0)
        self.port = int(listener.getsockname()[1])
        ready = threading.Event()
        app = make_app(self.service, Access())
        threading.Thread(target=run_server, args=(app, listener, ready), daemon=True).start()
        ready.wait()
        self.texts = sorted(work.texts, key=len)[len(work.texts) // 4 : -len(work.texts) // 4]
        (folder / "texts.json").write_text(json.dumps(self.texts), encoding="utf-8")
        self.file = folder / "texts.json"

    def put(self, count: int) -> None:
        """Add random tasks t0, t1, ... up to ``count``."""
        there = {entry.name for entry in self.service.tasks.entries()}
        for number in range(count):
            if f"t{number}" not in there:
                self.service.tasks.put(f"t{number}", self.work.injection(seed=number))

    def load(
        self, connections: int = 1, rate: float = 0.0, tasks: int = 8, seconds: float = 0.0
    ) -> dict[str, Any]:
        """Run clients, and return the latencies of answers and rejections, the rate, and the batch size."""
        rows, batches = self.counted()
        options = [self.port, connections, seconds or self.seconds, rate, tasks, self.file]
        command = [sys.executable, __file__, "--client", *map(str, options)]
        record = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        rows, batches = (
            after - before for after, before in zip(self.counted(), (rows, batches), strict=True)
        )
        done = sorted(taken for taken, status in record["requests"] if status == 200)
        refused = sorted(taken for taken, status in record["requests"] if status == 429)
        others = [status for _, status in record["requests"] if status not in {200, 429}]
        return {
            "done": done,
            "refused": refused,
            "others": others,
            "rate": len(done) / record["seconds"],
            "batch": rows / max(1, batches),
        }

    def counted(self) -> tuple[float, float]:
        """Return the number of rows and of batches that the server has run, from its metrics."""
        lines = (line.rsplit(maxsplit=1) for line in self.service.metrics.text().decode().splitlines())
        values = {name: value for name, value in lines if name.startswith("i2cl_batch_rows_")}
        return float(values["i2cl_batch_rows_sum"]), float(values["i2cl_batch_rows_count"])

    def direct(self, rows: int, seconds: float = 0.0) -> float:
        """Measure the rows per second of `InjectionPool.log_probs` on lists of ``rows``."""
        pool, names = self.service.tasks.pool, list(self.service.tasks.pool)
        texts, count = cycle(self.texts), 0
        started = time.perf_counter()
        while time.perf_counter() - started < (seconds or self.seconds):
            pool.log_probs(list(islice(texts, rows)), [names[at % len(names)] for at in range(rows)])
            count += rows
        return count / (time.perf_counter() - started)

    def rows(self, only: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of the table, or of one part."""
        parts = (
            self.throughput,
            self.latency,
            self.injected,
            self.mixed,
            self.overload,
            self.beside,
            self.many,
        )
        self.load(connections=4, seconds=2.0)
        for part in parts:
            if part.__name__ == (only or part.__name__):
                yield from part()

    def throughput(self) -> Iterator[dict[str, Any]]:
        """Compare 16 connections with direct lists of their mean batch size."""
        size = max(1, round(self.load(connections=16)["batch"]))
        pairs = [(self.load(connections=16)["rate"], self.direct(size)) for _ in range(self.rounds)]
        detail: dict[str, Any] = {"pairs": pairs, "rows_a_batch": size}
        yield _row("16 connections / direct lists, rows per second", _ratio(pairs), "x", ">= 0.85", detail)

    def latency(self) -> Iterator[dict[str, Any]]:
        """Compare one connection with direct calls."""
        short = self.seconds / SHORTER
        pairs = [
            (median(self.load(seconds=short)["done"]), 1 / self.direct(1, short))
            for _ in range(SHORTER * self.rounds)
        ]
        more = median(1000 * (one - other) for one, other in pairs)
        yield _row("one connection, p50 beyond a direct call", more, "ms", "<= 5", {"pairs": pairs})

    def injected(self) -> Iterator[dict[str, Any]]:
        """Compare injections with the plain model, both through the server."""
        pairs = []
        short = self.seconds / SHORTER
        for _ in range(SHORTER * self.rounds):
            injected = median(self.load(seconds=short)["done"])
            with self.plain():
                pairs.append((injected, median(self.load(seconds=short)["done"])))
        yield _row(
            "injected / plain through the server, p50", _ratio(pairs), "x", "<= 1.05", {"pairs": pairs}
        )

    def mixed(self) -> Iterator[dict[str, Any]]:
        """Compare a batch of 64 tasks with a batch of one task."""
        mixed, alone = self.queries(ROWS), self.queries(1)
        answers = self.service.tasks.pool.score_rows
        pair = paired(lambda: answers(alone), lambda: answers(mixed), self.decoder.device, self.rounds)
        yield _row("a batch of 64 tasks / of one task, time", pair.ratio, "x", "<= 1.10", vars(pair))

    def many(self) -> Iterator[dict[str, Any]]:
        """Compare 1,000 tasks on the device with 10."""
        few = median(median(self.load(tasks=10)["done"]) for _ in range(self.rounds))
        self.put(1000)
        for number in range(1000):
            self.service.tasks.queries(f"t{number}", [self.texts[0]])
        pairs = [
            (median(self.load(tasks=1000)["done"]), median(self.load(tasks=10)["done"]))
            for _ in range(self.rounds)
        ]
        detail = {"pairs": pairs, "p50_before": few, "resident": len(self.service.tasks.pool)}
        yield _row("1,000 tasks / 10 tasks, p50", _ratio(pairs), "x", "<= 1.05", detail)

    def overload(self) -> Iterator[dict[str, Any]]:
        """Send requests at four times the capacity."""
        tokens = sum(row.tokens for row in self.queries(1)) / ROWS
        batcher = self.service.batcher
        capacity = self.load(connections=32)["rate"]
        seen = []
        for _ in range(self.rounds):
            before, batcher.bound = batcher.bound, round(2 * capacity * tokens)  # two seconds of work
            result = self.load(connections=256, rate=OVERLOAD * capacity, seconds=2 * self.seconds)
            bound, batcher.bound = batcher.bound, before
            after = self.load(connections=32)["rate"]
            near, capacity = (capacity + after) / 2, after  # the machine's speed varies
            seen.append(
                {
                    "capacity": near,
                    "goodput": result["rate"] / near,
                    "p99_over_bound": _quantile(result["done"], 0.99) * near * tokens / bound,
                    "refused_p99_ms": 1000 * _quantile(result["refused"], 0.99),
                    "refused_p50_ms": 1000 * _quantile(result["refused"], 0.5),
                    "refused": len(result["refused"]),
                    "others": len(result["others"]),
                }
            )
        names = (
            ("requests at 4 x capacity: goodput / capacity", "goodput", "x", ">= 0.9"),
            ("the same: p99 of accepted requests / (bound / capacity)", "p99_over_bound", "x", "<= 1.2"),
            ("the same: p99 of refusals", "refused_p99_ms", "ms", "< 50"),
        )
        for name, key, unit, target in names:
            yield _row(name, median(one[key] for one in seen), unit, target, {"rounds": seen})

    def beside(self) -> Iterator[dict[str, Any]]:
        """Compare single texts during a fit or a batch file with single texts alone."""
        from i2cl.interfaces.server.client import Client

        http = Client(f"http://127.0.0.1:{self.port}")
        examples = [
            {"text": row.text, "label": self.work.task.labels[row.label]} for row in self.work.demonstrations
        ]
        template = self.work.task.template.format
        fit = {"evaluate": 0, "shots": 5}
        slow = {"evaluate": 0, "shots": 5, "method": "i2cl", "settings": {"epochs": 2000}}
        for name, begin in (
            ("an anchored fit", lambda: [http.fit("fit", examples, template, **fit) for _ in range(60)]),
            ("an I2CL fit", lambda: [http.fit("fit", examples, template, **slow)]),
            ("a file of 100,000 rows", lambda: [http.batch([{"input": self.texts[0]}] * 100_000, "t0")]),
        ):
            alone = self.load(seconds=2 * self.seconds)["done"]
            jobs = begin()
            time.sleep(1.0)
            during = self.load(seconds=2 * self.seconds)["done"]
            states = Counter(http.job(job)["status"] for job in jobs)
            for job in jobs[::-1]:
                if http.job(job)["status"] in {"queued", "running"}:
                    http.cancel(job)
            while any(http.job(job)["status"] == "running" for job in jobs):
                time.sleep(0.1)
            pair = [(_quantile(one, 0.99), median(one), len(one)) for one in (during, alone)]
            detail = {"during": pair[0], "alone": pair[1], "jobs": states}
            yield _row(f"single texts beside {name}, p99", pair[0][0] / pair[1][0], "x", "<= 3", detail)

    def queries(self, tasks: int) -> list[TaskQuery]:
        """Return 64 queries, spread over ``tasks`` tasks."""
        texts = list(islice(cycle(self.texts), ROWS))
        return [self.service.tasks.queries(f"t{row % tasks}", [text])[1][0] for row, text in enumerate(texts)]

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the server predict with the plain model."""
        pool: Any = self.service.tasks.pool

        def score_rows(rows: Sequence[TaskQuery]) -> list[RowScores]:
            labels = [row.task.scorer.labels for row in rows]
            scores = score(self.decoder, [row.ids for row in rows], labels)
            return [RowScores(log_probs, None) for log_probs in scores]

        pool.score_rows = score_rows
        try:
            yield
        finally:
            del pool.score_rows


def run_server(app: Any, listener: Any, ready: threading.Event) -> None:
    """Run the application on a listening socket, and set ``ready`` once it accepts requests."""
    import uvicorn

    def wait() -> None:
        while not server.started:
            time.sleep(0.01)
        ready.set()

    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=IDLE_SECONDS)
    server = uvicorn.Server(config)
    threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[listener])  # `i2cl serve` installs signal handlers, which need the main thread


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(one / other for one, other in pairs)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _row(name: str, value: float, unit: str, target: str, detail: dict[str, Any]) -> dict[str, Any]:
    print(f"{name}: {value:.3g} {unit} (target {target})", flush=True)
    return {"name": name, "value": value, "unit": unit, "target": target, "detail": detail}


def main() -> None:
    """Run the measurements, print and write them."""
    if "--client" in sys.argv:
        port, connections, seconds, rate, tasks, file = sys.argv[2:]
        texts = json.loads(Path(file).read_text(encoding="utf-8"))
        client(int(port), int(connections), float(seconds), float(rate), int(tasks), texts)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="throughput, latency, injected, mixed, overload, beside, many"
    )
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    work = Workload.make(random_decoder(given.shape, given.device), queries=64)
    with TemporaryDirectory() as scratch:
        rows = list(Bench(work, Path(scratch), given.seconds, given.rounds).rows(given.only))
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "shape": given.shape, "rows": rows}
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
