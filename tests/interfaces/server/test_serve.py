"""`i2cl serve` as a process."""

import asyncio
import json
import os
import re
import signal
import socket
from contextlib import contextmanager

import pytest

from i2cl.interfaces.server.client import AsyncClient, Client, ServerError
from i2cl.interfaces.server.task_store import STATE
from i2cl.tasks import load_task
from processes import COMMAND, Program, until

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


def address(program):
    return until(lambda: re.search(r'http://[^"\s]+(?=["\s])', program.output()[0]), program=program)[0]


@contextmanager
def serving(tasks, *options, code=COMMAND):
    """Run a server of the bundled model, and yield its URL. It has to exit with code 0."""
    program = Program(code, "serve", "reference", "--tasks", tasks, "--port", 0, *options)
    try:
        yield address(program)
    finally:
        program.process.terminate()
        code, _, messages = program.wait()
    assert code == 0, messages


def examples(task, count):
    return [{"text": row.text, "label": task.labels[row.label]} for row in task.train[:count]]


def test_process_serves_fits_and_shuts_down_cleanly(tmp_path):
    program = Program(COMMAND, "serve", "reference", "--tasks", tmp_path / "tasks", "--port", 0, "--json")
    url = address(program)
    assert json.loads(program.output()[0]) == {"address": url, "model": "reference", "tasks": 0}
    client, task = Client(url), load_task("mood-colour-1")
    job = client.fit(
        "mood", examples(task, 40), task.template.format, settings={"steps": 1}, evaluate=0, shots=2
    )
    assert client.wait(job)["name"] == "mood"
    texts = [row.text for row in task.test[:3]]
    result = client.classify("mood", texts)

    async def classify():
        async with AsyncClient(url) as one:
            return await one.classify("mood", texts)

    assert asyncio.run(classify()) == result
    assert result[0].digest == client.tasks()[0]["digest"]
    assert sum(result[0].probabilities.values()) == pytest.approx(1)
    for call, code in ((lambda: client.classify("none", texts), 404), (lambda: client.fit("x", [], ""), 422)):
        with pytest.raises(ServerError, match=": ") as refused:
            call()
        assert refused.value.status == code
    line = client.batch([{"input": text} for text in texts], "mood")
    client.wait(line)
    assert [one["label"] for one in client.answers(line)] == [one.label for one in result]
    slow = client.fit("slow", examples(task, 40), task.template.format, method="i2cl", evaluate=0)
    until(lambda: client.job(slow)["last"]["event"] == "step")
    os.kill(program.process.pid, signal.SIGTERM)
    code, _, messages = program.wait()
    assert (code, messages.count("Traceback")) == (0, 0), messages
    with pytest.raises(ServerError, match="check that the server runs"):
        Client(url, retries=0).tasks()
    (record,) = (tmp_path / "tasks" / STATE / "jobs" / slow).glob("job.json")
    assert [event["event"] for event in json.loads(record.read_text())["events"]] == ["queued", "started"]


def test_fit_predict_and_serve_share_a_task_folder(call, tmp_path):
    rows = examples(load_task("mood-colour-1"), 20)
    table = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    (tmp_path / "tickets.csv").write_text(table)
    (tmp_path / "new.csv").write_text("text\n" + rows[0]["text"] + "\n")
    folder = tmp_path / "tasks" / "tickets"
    fit = ("fit", "reference", tmp_path / "tickets.csv", "-o", folder, "--evaluate", 0, "--shots", 1)
    assert call(*fit, "--set", "steps=1")[0] == 0
    assert call("predict", folder, tmp_path / "new.csv", "-o", tmp_path / "answers.csv")[0] == 0
    with serving(tmp_path / "tasks") as url, Client(url) as client:
        (answer,) = client.classify("tickets", [rows[0]["text"]])
        assert [task["source"] for task in client.tasks()] == ["folder"]
    assert answer.label in (tmp_path / "answers.csv").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "give a --token-file, or listen on 127.0.0.1"),
        (("--token-file", "none"), "--token-file .* cannot be read"),
        (("--port", "70000"), "--port"),
        (("--max-waiting-tokens", "0"), "--max-waiting-tokens"),
        (("--read-only", "--port", "0"), "has no tasks"),
        (("--host", "203.0.113.1"), "token-file"),
    ],
)
def test_invalid_options_are_reported_in_one_line(call, tmp_path, options, message):
    code, out, err = call("serve", "reference", "--tasks", tmp_path / "tasks", *options)
    assert (code, out, err.count("error: ")) == (2, "", 1)
    assert re.search(message, err)


def test_occupied_port_is_reported(call, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = call("serve", "reference", "--tasks", tmp_path / "tasks", "--port", port)
    assert (code, "choose another --host or --port" in err) == (2, True)
