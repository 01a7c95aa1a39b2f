"""Label a file on the page of `i2cl serve`, in headless Chromium by the keyboard, up to a served task.

    python scripts/labelling_session.py smollm2 trec -o session

The task is a name or a file with the columns text and label. The page gets its texts only; each label that
the script types is the text's own. The server is killed with SIGKILL in the middle and started again. Labels
without a text are left out at the end. Prints the minutes of each part, the processor time, the seconds of
each round, and the accuracy of the served task on the texts that were not labelled; saves screenshots at
widths of 1,280 and 390 pixels. Exits with 1 if axe finds a violation (with axe-playwright-python).

Needs the extra ``serve``, playwright, and Chromium.
"""

import argparse
import csv
import re
import shutil
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil

from i2cl.interfaces.server.client import Client
from i2cl.interfaces.server.labelling import LABELS_PER_ROUND
from i2cl.tasks import load_task
from i2cl.tasks.template import DEFAULT_TEMPLATE
from processes import COMMAND, Program, until

NAME = "session"
WIDTHS = (1280, 390)  # pixels
KEYS = 9  # labels that have a key
NEXT = """text => document.querySelector('#answer').hidden
                 || document.querySelector('#text').textContent !== text"""
TIMEOUT = 3600.0  # seconds for the first texts, a round, or the fit


class Session:
    """A page, the server behind it, and the gold labels of its texts."""

    def __init__(self, model: str, gold: dict[str, str], folder: Path, output: Path, page: Any) -> None:
        self.model, self.gold, self.folder, self.output, self.page = model, gold, folder, output, page
        self.labels = sorted(set(gold.values()))
        self.violations: list[str] = []
        self.processor_seconds = 0.0  # of the servers that have ended
        self.start(0)

    def start(self, port: int) -> None:
        """Start the server, and wait for its address."""
        self.program = Program(COMMAND, "serve", self.model, "--tasks", self.folder / "tasks", "--port", port)

        def address() -> re.Match[str] | None:
            return re.search(r"http://\S+:(\d+)", self.program.output()[0])

        found = until(address, TIMEOUT, self.program)
        self.url, self.port = found[0], int(found[1])

    def create(self) -> None:
        """Create a project of all texts, and wait for the first ones to label."""
        path = self.folder / f"{NAME}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in self.gold)])
        self.page.goto(f"{self.url}/labelling")
        self.page.set_input_files("#file", path)
        self.page.fill("#labels", ", ".join(self.labels))
        self.page.click("#create .main")
        self.page.wait_for_selector("#answer:not([hidden])")

    def label(self, count: int) -> None:
        """Give the gold labels of the next texts."""
        for _ in range(count):
            self.page.wait_for_selector("#answer:not([hidden])")
            self.page.focus("#text")
            before = self.page.text_content("#text")
            place = self.labels.index(self.gold[before])
            if place < KEYS:
                self.page.keyboard.press(str(place + 1))
            else:
                self.page.check(f"#choices input[value='{place}']")
            self.page.keyboard.press("Enter")
            self.page.wait_for_function(NEXT, arg=before)

    def kill(self) -> None:
        """Kill the server, and start it again on the same port."""
        before = self.labelled()
        self.end(self.program.process.kill)
        self.start(self.port)
        self.page.reload()
        self.page.wait_for_selector("#answer:not([hidden])")
        assert before == self.labelled(), f"{before} labels before the kill, {self.labelled()} after it"

    def end(self, stop: Callable[[], None]) -> None:
        """Stop the server, and add its processor time."""
        times = psutil.Process(self.program.process.pid).cpu_times()
        self.processor_seconds += times.user + times.system
        stop()
        self.program.process.join()

    def labelled(self) -> int:
        """Return the number of labels that the page shows."""
        (count,) = re.findall(r"(\d+) of \d+ texts labelled", self.page.text_content("#counts"))
        return int(count)

    def wait_for_rounds(self) -> None:
        """Wait until no round is queued or running, and none will follow."""
        client = Client(self.url)

        def is_last() -> bool:
            job = rounds(client)[-1]
            assert job["status"] != "failed", job
            return job["status"] == "done" and self.labelled() - job["last"]["labels"] < LABELS_PER_ROUND

        until(is_last, TIMEOUT)

    def finish(self) -> None:
        """Press the button that fits and serves the task, answer its question, and wait for the task."""

        def accept(dialog: Any) -> None:
            print(dialog.message)
            dialog.accept()

        self.page.on("dialog", accept)
        self.page.click("#serve")
        self.page.wait_for_selector("#code:not([hidden]), #served.wrong")
        assert self.page.locator("#code").is_visible(), self.page.text_content("#served")

    def photograph(self, name: str) -> None:
        """Save a screenshot of each width, and check both for accessibility."""
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": 900})
            self.page.screenshot(path=self.output / f"{name}-{width}.png", full_page=True)
            if find_spec("axe_playwright_python") is not None:
                axe = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
                found = self.page.evaluate(f"{axe};axe.run(document, {{}})")["violations"]
                self.violations += [f"{name} at {width}: {one['id']}" for one in found]

    def accuracy(self) -> tuple[float, int]:
        """Return the accuracy of the served task on texts that were not labelled, and their number."""
        client = Client(self.url)
        labelled = {row["text"] for row in csv.DictReader(self.exported().splitlines())}
        rest = [text for text in self.gold if text not in labelled]
        answers = [
            one.label for at in range(0, len(rest), 50) for one in client.classify(NAME, rest[at : at + 50])
        ]
        return sum(self.gold[text] == label for text, label in zip(rest, answers, strict=True)) / len(
            rest
        ), len(rest)

    def exported(self) -> str:
        """Return the labelled texts as CSV, by the button of the page."""
        with self.page.expect_download() as download:
            self.page.click("#export")
        return Path(download.value.path()).read_text(encoding="utf-8")


def rounds(client: Client) -> list[dict[str, Any]]:
    """Return the rounds of all projects, oldest first."""
    return [client.job(job["id"]) for job in client.jobs() if job["kind"] == "labelling"][::-1]


def main() -> None:
    """Run a session, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("task", help="file with the columns text and label, or name of a task")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--labels", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the screenshots")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    task = load_task(given.task, template=DEFAULT_TEMPLATE)
    drawn = Random(given.seed).sample(task.train, min(given.texts, len(task.train)))
    gold = {row.text: task.labels[row.label] for row in drawn}
    seconds: dict[str, float] = {}

    def timed(part: str, work: Callable[[], None]) -> None:
        began = time.monotonic()
        work()
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began

    given.output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(accept_downloads=True)
        page.set_default_timeout(1000 * TIMEOUT)
        session = Session(given.model, gold, Path(folder), given.output, page)
        try:
            timed("first texts", session.create)
            timed("labelling", lambda: session.label(given.labels // 2))
            timed("kill and restart", session.kill)
            timed("labelling", lambda: session.label(given.labels - given.labels // 2))
            session.photograph("labelling")
            timed("last round", session.wait_for_rounds)
            timed("finish", session.finish)
            session.photograph("finished")
            accuracy, rest = session.accuracy()
            curve = page.text_content("#measured")
            each = [
                (job["last"]["labels"], job["last"]["at"] - job["created"])
                for job in rounds(Client(session.url))
            ]
        finally:
            session.end(session.program.process.terminate)
            browser.close()
    for part, spent in seconds.items():
        print(f"{part}: {spent / 60:.1f} minutes")
    print(f"processor time of the server: {session.processor_seconds / 60:.1f} minutes")
    print("rounds:", ", ".join(f"{labels} labels in {spent:.0f} s" for labels, spent in each))
    print(f"{curve}\nServed task: {100 * accuracy:.1f} % of {rest} other texts are right")
    if session.violations:
        sys.exit("axe: " + "; ".join(session.violations))


if __name__ == "__main__":
    main()
