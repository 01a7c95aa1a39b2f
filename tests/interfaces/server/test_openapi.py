"""What is answered, held by schemathesis against what /openapi.json promises: status, shape, and no 5xx."""

import json

import pytest

pytest.importorskip("schemathesis", reason="needs schemathesis")
pytest.importorskip("fastapi")

import schemathesis
from schemathesis import Config, engine
from schemathesis.engine.events import NonFatalError, ScenarioFinished

from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access
from i2cl.interfaces.server.service import Service
from i2cl.models.decoder import Decoder
from tiny import tiny_model, tiny_tokenizer

from .conftest import made, packed
from .test_jobs import ended

CONFIG = {
    "seed": 1,
    "generation": {"max-examples": 20},
    "checks": {"positive_data_acceptance": {"enabled": False}},  # a template has rules that no schema tells
}

schemathesis.serializer.alias("application/jsonl", "application/json")


@schemathesis.serializer("application/x-tar")
def _tar(_, value):
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The description, of a server whose task, artefact and answered file requests find half the time."""
    folder = tmp_path_factory.mktemp("served")
    service = Service(Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama"), folder / "tasks")
    injection = made(service.decoder, 0)
    injection.save_pretrained(folder / "films")
    entry = service.tasks.put("films", injection)
    line = json.dumps({"input": "a warm film", "model": "films", "custom_id": None}).encode() + b"\n"
    record = {"rows": 1, "tasks": ["films"], "digests": {"films": entry.digest}}
    job = ended(service.jobs.add("batch", record, {"input.jsonl": line})).id
    app = make_app(service, Access())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=Config.from_dict(CONFIG))
    here = {"name": "films", "identity": job}

    def result(given):
        return len(str(given)) % 2 == 0

    @schema.hook
    def map_path_parameters(context, path_parameters):
        if path_parameters and result(path_parameters) and context.operation.method != "delete":
            return path_parameters | {name: here[name] for name in path_parameters.keys() & here}
        return path_parameters

    @schema.hook
    def map_body(context, body):
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and 0 < len(model) <= 128 and result(body):
            return body | {"model": "films"}
        if context.operation.method == "put" and result(body):
            return packed(folder / "films")
        return body

    yield schema
    service.close()


def test_it_answers_as_it_is_described(described):
    wrong, asked = [], 0
    for event in engine.from_schema(described).execute():
        if isinstance(event, NonFatalError):
            wrong.append(f"{event.label}: {event.info.title}")
        if isinstance(event, ScenarioFinished):
            asked += len(event.recorder.cases)
            failures = [one.failure_info for checks in event.recorder.checks.values() for one in checks]
            wrong += [f"{one.failure.title}: {one.code_sample}" for one in failures if one is not None]
    assert asked > 500
    assert not wrong, "\n".join(wrong)
