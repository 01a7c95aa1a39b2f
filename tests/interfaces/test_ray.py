"""What runs on Ray, all on one cluster: rows and cells come out as they do here, and so do errors."""

import json
import socket
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from commands import run
from experiments.runs import run_alone
from i2cl import I2CLError, load_task
from i2cl.experiments.store import Store
from i2cl.experiments.workers.cluster import joined
from i2cl.interfaces.batch_prediction.prediction import Scorer
from i2cl.models.decoder import Decoder
from processes import finished

pytest.importorskip("ray.data", reason="ray is not installed")

TASK = "mood-colour-1"
GRID = """
title = "cheap"
measures = "a method that works and one that fails"
views = ["tasks"]
tasks = ["mood-colour-1"]
rows = [
  { name = "Few-shot (ICL)", method = "few_shot" },
  { name = "Linear probe", method = "linear_probe", options = { probe_layer = 99 } },
]
full = { seeds = 2, limit = 12 }
"""
# Runs several commands, of which the first starts a cluster, the others find it.
COMMANDS = """
import json, sys
import ray
from i2cl.interfaces.cli import main
start, stop = ray.init, ray.shutdown
ray.init = lambda **options: ray.is_initialized() or start(**options)
ray.shutdown = lambda: None
try:
    for name, words in json.loads(sys.argv[1]).items():
        try:
            main(words)
        except SystemExit as done:
            print(f"{name} ended with {done.code}", file=sys.stderr, flush=True)
finally:
    stop()
"""


def predict(folder, source, output, *more):
    words = ["predict", folder / "mood", folder / source, "-o", folder / output]
    return [str(word) for word in [*words, "--chunk", "10", "--row-number", *more]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An artefact for the bundled model, texts of which an interrupted run has done ten, and a grid."""
    made = tmp_path_factory.mktemp("home")
    texts = [example.text for example in load_task(TASK).test[:25]]
    (made / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    (made / "bad.txt").write_text("".join(f"{text}\n" for text in [*texts[:14], " ", *texts[14:]]))
    (made / "mine.toml").write_text(GRID)
    assert run("fit", "reference", TASK, "-o", made / "mood", "--shots", "1", "--set", "epochs=1") == 0
    assert run(*predict(made, "texts.txt", "here.tsv")) == 0
    score = Scorer.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "__call__", lambda *at: score(*at) if at[1][0].text == texts[0] else stop())
        assert run(*predict(made, "texts.txt", "out.tsv")) == 130
    return made


def stop():
    raise KeyboardInterrupt


def test_three_commands_on_one_cluster(folder, tmp_path):
    """In one test, since a cluster and its workers take half a minute of two cores."""
    grid = ["experiment", "run", str(folder / "mine.toml"), "--store", str(folder / "store"), "--json"]
    commands = {
        "texts": predict(folder, "texts.txt", "out.tsv"),
        "bad texts": predict(folder, "bad.txt", "none.tsv"),
        "no model": [*grid, "--model", str(folder / "none")],
        "cells": grid,
    }
    on_ray = {name: [*words, "--executor", "ray", "--workers", "1"] for name, words in commands.items()}
    code, out, err = finished(COMMANDS, json.dumps(on_ray))
    assert code == 0, err
    goes_on_with_a_local_run_and_gives_the_same_bytes(folder, err.splitlines()[:3])
    says_of_a_bad_row_one_line(folder, err.splitlines()[3:5])
    told, code = err.splitlines()[5:7]  # an actor that cannot load it says why
    assert told.startswith(f"error: model folder '{folder / 'none'}' does not exist")
    assert code == "no model ended with 2"
    assert err.splitlines()[-1] == "cells ended with 1"  # there is no layer 99
    makes_the_cells_that_run_here(folder, json.loads(out), tmp_path)


def goes_on_with_a_local_run_and_gives_the_same_bytes(folder, told):
    first, saved, code = told
    assert (first, code) == ("10 rows of an earlier run are kept", "texts ended with 0")
    assert "25 rows" in saved
    assert (folder / "out.tsv").read_bytes() == (folder / "here.tsv").read_bytes()
    assert not list(folder.glob(".*.part*"))


def says_of_a_bad_row_one_line(folder, told):
    expected = f"error: {folder / 'bad.txt'} line 15: the text is empty: fill it in or delete the row"
    assert told == [expected, "bad texts ended with 2"]
    assert not (folder / "none.tsv").exists()


def makes_the_cells_that_run_here(folder, told, tmp_path):
    assert {key: told[key] for key in ("done", "failed")} == {"done": 2, "failed": 2}
    decoder = Decoder.from_pretrained("reference")
    for record in Store.open(folder / "store").records.values():
        here = run_alone(record.cell, decoder, tmp_path)
        assert (here.status, here.error) == (record.status, record.error)
        if here.outcome:
            assert here.outcome.predictions == record.outcome.predictions


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "{folder}/mood", "{folder}/texts.txt", "-o"],
        ["experiment", "run", "{folder}/mine.toml", "--store"],
    ],
    ids=lambda words: words[0],
)
def test_a_cluster_that_is_not_there(folder, tmp_path, refused, monkeypatch, words):
    """Ray says so in such an error; it is not asked, since another test may have a cluster running."""
    none_there = ConnectionError("Could not find any running Ray instance.")
    monkeypatch.setattr("ray.init", Mock(side_effect=none_there))
    filled = [word.format(folder=folder) for word in words]
    assert "ray start --head" in refused(*filled, tmp_path / "new", "--executor", "ray", "--address", "auto")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def answering(answer):
    """An address where the first client is answered, or left waiting if that is None."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            client, _ = listening.accept()
            with client:
                if answer is None:
                    client.settimeout(5)
                    client.recv(100)
                    client.recv(1)  # until the other side gives up
                else:
                    client.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        server.join()


ANSWERS = {"no word": b"", "silence": None, "HTTP/1": b"HTTP/1.1 400 Bad Request\r\n\r\n"}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_no_ray_answers_is_refused_before_ray_waits_for_it(monkeypatch, scheme, answer):
    monkeypatch.setattr("ray.init", lambda **_options: pytest.fail("Ray would wait for minutes"))
    monkeypatch.setattr("i2cl.experiments.workers.cluster.PATIENCE", 0.2)
    refusal = pytest.raises(I2CLError, match="no Ray cluster at")
    with answering(ANSWERS[answer]) as address, refusal, joined(f"{scheme}{address}"):
        pass


def test_an_address_of_nobody_is_refused_and_one_of_ray_is_not(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(I2CLError, match="refused"), joined(address):
        pass

    def there(**options):
        raise ValueError(f"Ray was asked at {options['address']}")

    monkeypatch.setattr("ray.init", there)
    reply = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with answering(reply) as address, pytest.raises(I2CLError, match=f"asked at {address}"), joined(address):
        pass
