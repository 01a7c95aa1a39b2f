"""Kill `i2cl serve` at random moments, and run it under mixed load: acknowledged changes must survive.

The load consists of queries to four tasks that are replaced continuously, fits, batch files, cancellations,
malformed and overflowing uploads, clients that disconnect, and incomplete or missing headers.

    python scripts/fuzz_serve.py --kills 50 --minutes 5

Needs the extra ``serve``. Exit code 1 if anything was lost, duplicated or wrong, or if memory grew.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from safetensors.torch import load_file, save  # noqa: E402

from i2cl import Decoder, Injection  # noqa: E402
from i2cl.interfaces.server.client import Client, ServerError  # noqa: E402
from i2cl.tasks import load_task  # noqa: E402
from processes import COMMAND, Program  # noqa: E402

TASK = load_task("mood-colour-1")
TEXTS = [row.text for row in TASK.test]
EXAMPLES = [{"text": row.text, "label": TASK.labels[row.label]} for row in TASK.train[:40]]
QUICK: dict[str, Any] = {"settings": {"steps": 1}, "evaluate": 0, "shots": 1}
GROWTH = 0.05
"""Maximum relative growth of resident memory from the second to the last fifth of the time."""


def started(folder: Path) -> tuple[Program, Client]:
    """Start a server on a folder, and wait until it answers."""
    program = Program(COMMAND, "serve", "reference", "--tasks", folder, "--port", 0)
    while not (result := re.search(r"http://\S+", program.output()[0])):
        assert program.process.is_alive(), program.output()
        time.sleep(0.02)
    return program, Client(result[0], retries=0)


def artefacts(folder: Path, count: int) -> list[Injection]:
    """Save random injections of the bundled model as 0, 1, ..., and return them."""
    from workload import Workload

    work = Workload.make(Decoder.from_pretrained("reference"), queries=1)
    result = []
    for number in range(count):
        injection = work.injection(seed=number)
        injection.save_pretrained(folder / str(number))
        result.append(injection)
    return result


def kills(count: int, draw: random.Random) -> Counter[str]:
    """Upload, delete, fit and send files until a kill; after a restart, check what was acknowledged."""
    result: Counter[str] = Counter()
    with TemporaryDirectory() as scratch:
        artefacts(Path(scratch), 6)
        folder = Path(scratch) / "tasks"
        names: dict[str, str | None] = {}  # acknowledged state: a digest, or None if deleted
        doubtful: set[str] = set()  # sent but not acknowledged before the kill
        fits: set[str] = set()
        batches: dict[str, list[str]] = {}
        cancels: dict[str, float] = {}  # time of acknowledgement
        for number in range(count + 1):
            program, client = started(folder)
            here = {one["id"]: one["digest"] for one in client.tasks()}
            for name, digest in names.items():
                if name not in doubtful and here.get(name) != digest:
                    result["lost or changed task"] += 1
            names = {name: here.get(name) for name in names}
            for name in here:  # loads every artefact
                if not name.startswith("fit-"):
                    client.classify(name, ["a warm film"])
            doubtful.clear()
            known = {job["id"] for job in client.jobs()}
            result["lost job"] += len((fits | set(batches) | set(cancels)) - known)
            if number == count:
                check_ends(client, fits, batches, cancels, result)
                os.kill(program.process.pid, signal.SIGTERM)
                result["exit code not 0"] += program.wait()[0] != 0
                break
            threading.Timer(draw.uniform(0.02, 2.0), os.kill, (program.process.pid, signal.SIGKILL)).start()
            with suppress(ServerError):
                while True:
                    act(client, Path(scratch), draw, names, doubtful, fits, batches, cancels)
                    result["acknowledged"] += 1
            program.process.join()
            result["kills"] += 1
    return result


def act(
    client: Client,
    scratch: Path,
    draw: random.Random,
    names: dict[str, str | None],
    doubtful: set[str],
    fits: set[str],
    batches: dict[str, list[str]],
    cancels: dict[str, float],
) -> None:
    """Send a random request, and record what the server acknowledges."""
    kind = draw.random()
    name = draw.choice("abcdef")
    if kind < 0.5:
        doubtful.add(name)
        names[name] = client.upload(name, scratch / str(draw.randrange(6)))
        doubtful.discard(name)
    elif kind < 0.6 and names.get(name):
        doubtful.add(name)
        client.delete(name)
        names[name] = None
        doubtful.discard(name)
    elif kind < 0.7 and len(fits) < 12:
        new = f"fit-{draw.randrange(10**9)}"
        fits.add(client.fit(new, EXAMPLES, TASK.template.format, **QUICK))
    elif kind < 0.8 and names.get(name) and len(batches) < 30:
        texts = draw.choices(TEXTS, k=150)
        batches[client.batch([{"input": text} for text in texts], name)] = texts
    elif kind < 0.85 and (jobs := [*fits, *batches]):
        cancel(client, draw.choice(jobs), fits, batches, cancels)
    else:
        time.sleep(0.02)


def cancel(
    client: Client, job: str, fits: set[str], batches: dict[str, list[str]], cancels: dict[str, float]
) -> None:
    """Cancel a job that is queued or running."""
    if client.job(job)["status"] not in {"queued", "running"}:
        return
    fits.discard(job)
    batches.pop(job, None)
    if client.cancel(job)["status"] in {"queued", "running", "cancelled"}:
        cancels[job] = time.time()


def check_ends(
    client: Client,
    fits: set[str],
    batches: dict[str, list[str]],
    cancels: dict[str, float],
    result: Counter[str],
) -> None:
    """Check that every acknowledged job ends, and that batch results are complete and in order."""
    for job, when in cancels.items():
        ended(client, job)
        reply = client.job(job)
        result["cancels"] += 1
        result["cancellations lost"] += reply["status"] != "cancelled" and reply["last"]["at"] > when + 1
    for job in fits:
        result["fits done"] += client.wait(job)["event"] == "done"
    for job, texts in batches.items():
        client.wait(job)
        lines = [one["line"] for one in client.answers(job)]
        result["files done"] += 1
        result["lines missing, duplicated or out of order"] += lines != list(range(1, len(texts) + 1))


def ended(client: Client, job: str, seconds: float = 120.0) -> bool:
    """Wait for a job, and return whether it ended in time, with any status."""
    ends = time.monotonic() + seconds
    while client.job(job)["status"] in {"queued", "running"}:
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def spoiled(folder: Path) -> list[bytes]:
    """Return invalid tar files: a sparse file of 4 GB, a hard link, a truncated file, overflowing numbers."""
    description, tensors = folder / "injection.json", folder / "injection.safetensors"
    info = tarfile.TarInfo(tensors.name)
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for place, value in (
        (386, b"%011o\0" % (4 * 2**30 - 512)),
        (483, b"\x80" + (4 * 2**30).to_bytes(11, "big")),
    ):
        head[place : place + len(value)] = value
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    link = tarfile.TarInfo(tensors.name)
    link.type, link.linkname = tarfile.LNKTYPE, description.name
    values = load_file(tensors)
    values["context_vector"] = values["context_vector"] * 0 + 3e37
    whole = _tar(description.name, description.read_bytes())
    return [
        whole + bytes(head),
        whole + link.tobuf(),
        whole + _tar(tensors.name, tensors.read_bytes())[:-512],
        whole + _tar(tensors.name, save(values)),
    ]


def _tar(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf() + content + bytes(-len(content) % 512)


class Load:
    """Send all kinds of requests from several threads, and compare every answer with its version's."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        decoder = Decoder.from_pretrained("reference")
        self.texts = TEXTS[:20]
        self.right = [one.log_probs(decoder, self.texts).softmax(-1) for one in artefacts(scratch, 8)]
        self.program, self.client = started(scratch / "tasks")
        self.versions = {self.client.upload(f"t{at % 4}", scratch / str(at)): at for at in range(8)}
        self.spoiled = spoiled(scratch / "0")
        self.result: Counter[str] = Counter()
        self.ends = 0.0

    def run(self, minutes: float) -> Counter[str]:
        """Run the load for some minutes."""
        self.ends = time.monotonic() + 60 * minutes
        threads = [threading.Thread(target=self.ask, args=(number,)) for number in range(4)]
        threads += [threading.Thread(target=work) for work in (self.change, self.cancel, self.annoy)]
        for thread in threads:
            thread.start()
        sizes = []
        while time.monotonic() < self.ends:
            time.sleep(5)
            sizes.append(resident(self.program.process.pid))
        for thread in threads:
            thread.join()
        part = len(sizes) // 5
        growth = max(sizes[-part:]) / max(sizes[part : 2 * part]) - 1
        self.result["growth of memory, per mille"] = round(1000 * growth)
        self.result["memory grew"] = growth > GROWTH
        os.kill(self.program.process.pid, signal.SIGTERM)
        self.result["exit code not 0"] = self.program.wait()[0] != 0
        return self.result

    def ask(self, seed: int) -> None:
        """Classify texts, and check the answers."""
        draw = random.Random(seed)
        while time.monotonic() < self.ends:
            chosen = draw.sample(range(20), draw.choice((1, 1, 1, 5)))
            try:
                answers = self.client.classify(f"t{draw.randrange(4)}", [self.texts[row] for row in chosen])
            except ServerError as error:
                self.result["busy" if error.status == 429 else "lost requests"] += 1
                self.result[f"refused: {error.status} {error.code}"] += 1
                continue
            for row, one in zip(chosen, answers, strict=True):
                expected = self.right[self.versions[one.digest]][row]
                away = torch.tensor(list(one.probabilities.values())).sub(expected).abs().max()
                self.result["answers" if away < 1e-5 else "wrong answers"] += 1

    def change(self) -> None:
        """Upload tasks, fit, and run batch files."""
        draw = random.Random(99)
        while time.monotonic() < self.ends:
            self.client.upload(f"t{draw.randrange(4)}", self.scratch / str(draw.randrange(8)))
            self.result["uploads"] += 1
            if draw.random() < 0.1:
                self.client.wait(self.client.fit("fit", EXAMPLES, TASK.template.format, **QUICK))
                self.result["fits"] += 1
            if draw.random() < 0.2:
                job = self.client.batch([{"input": text} for text in self.texts], "t0")
                self.client.wait(job)
                self.client.delete_job(job)
                self.result["files"] += 1
            time.sleep(0.2)

    def cancel(self) -> None:
        """Start fits and batch files, and cancel them."""
        draw = random.Random(100)
        lines = [{"input": text} for text in self.texts * 20]
        while time.monotonic() < self.ends:
            long = {"method": "i2cl", "settings": {"epochs": 10_000}, "evaluate": 0, "shots": 1}
            jobs = [self.client.fit("long", EXAMPLES, TASK.template.format, **long)]
            jobs.append(self.client.batch(lines, "t1"))
            time.sleep(draw.uniform(0.0, 2.0))
            for job in jobs:
                self.client.cancel(job)
                self.result["cancelled jobs that do not end"] += not ended(self.client, job)
                self.result["cancels"] += 1

    def annoy(self) -> None:
        """Send invalid uploads, and open connections that send incomplete requests."""
        draw = random.Random(101)
        address = re.search(r"http://(.*):(\d+)", self.program.output()[0])
        assert address is not None
        place = address[1], int(address[2])
        text = json.dumps({"model": "t2", "input": self.texts * 20}).encode()
        head = b"POST /v1/classify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        fragments = (head + b"Content-Length: %d\r\n\r\n" % len(text) + text, head, b"GET /v1/mod", b"")
        open_ones: list[socket.socket] = []
        while time.monotonic() < self.ends:
            body = draw.choice(self.spoiled)
            connection = HTTPConnection(*place, timeout=120)
            connection.request("PUT", "/v1/tasks/spoiled", body, {"Content-Type": "application/x-tar"})
            refused = connection.getresponse().status == 422
            self.result["invalid uploads rejected" if refused else "invalid uploads accepted"] += 1
            connection.close()
            open_ones.append(socket.create_connection(place))
            open_ones[-1].sendall(draw.choice(fragments))
            self.result["clients that disconnect"] += 1
            while len(open_ones) > 20:
                open_ones.pop(0).close()
            time.sleep(0.1)
        for one in open_ones:
            one.close()


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


WRONG = (
    "lost or changed task",
    "lost job",
    "lines missing, duplicated or out of order",
    "wrong answers",
    "memory grew",
    "exit code not 0",
    "cancellations lost",
    "cancelled jobs that do not end",
    "invalid uploads accepted",
)


def main() -> None:
    """Run the kills and the load, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(given.seed)
    result: Counter[str] = Counter()
    for part in parts(given, draw):
        print(json.dumps(dict(part), indent=1), flush=True)
        result.update(part)
    sys.exit(any(result[name] for name in WRONG))


def parts(given: argparse.Namespace, draw: random.Random) -> Iterator[Counter[str]]:
    """Run the parts, and yield the counts of each."""
    if given.kills:
        yield kills(given.kills, draw)
    if given.minutes:
        with TemporaryDirectory() as scratch:
            yield Load(Path(scratch)).run(given.minutes)


if __name__ == "__main__":
    main()
