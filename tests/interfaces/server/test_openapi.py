"""Schemathesis: responses conform to /openapi.json, and none is a 5xx."""

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

from .conftest import make_injection, tar_of
from .test_jobs import wait_until_ended

CONFIG = {
    "seed": 1,
    "suppress-health-check": ["too_slow"],  # on a busy machine
    "generation": {"max-examples": 20},
    "checks": {
        "positive_data_acceptance": {"enabled": False}
    },  # a schema cannot express the rules of templates
}

schemathesis.serializer.alias("application/jsonl", "application/json")


@schemathesis.serializer("application/x-tar")
def _tar(_, value):
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    """Schema of a server. Half of the requests name its task, artefact or finished job."""
    folder = tmp_path_factory.mktemp("served")
    service = Service(Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama"), folder / "tasks")
    injection = make_injection(service.decoder, 0)
    injection.save_pretrained(folder / "films")
    entry = service.tasks.put("films", injection)
    line = json.dumps({"input": "a warm film", "model": "films", "custom_id": None}).encode() + b"\n"
    record = {"rows": 1, "tasks": ["films"], "digests": {"films": entry.digest}}
    job = wait_until_ended(service.jobs.add("batch", record, {"input.jsonl": line})).id
    app = make_app(service, Access())
    description = schemathesis.openapi.from_asgi("/openapi.json", app, config=Config.from_dict(CONFIG))
    here = {"name": "films", "identity": job}

    def result(given):
        return len(str(given)) % 2 == 0

    @description.hook
    def map_path_parameters(context, path_parameters):
        if path_parameters and result(path_parameters) and context.operation.method != "delete":
            return path_parameters | {name: here[name] for name in path_parameters.keys() & here}
        return path_parameters

    @description.hook
    def map_body(context, body):
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and 0 < len(model) <= 128 and result(body):
            return body | {"model": "films"}
        if context.operation.method == "put" and result(body):
            return tar_of(folder / "films")
        return body

    yield description
    service.close()


def test_server_conforms_to_its_openapi_description(schema):
    problems, requests = [], 0
    for event in engine.from_schema(schema).execute():
        if isinstance(event, NonFatalError):
            problems.append(f"{event.label}: {event.info.title}")
        if isinstance(event, ScenarioFinished):
            requests += len(event.recorder.cases)
            failures = [one.failure_info for checks in event.recorder.checks.values() for one in checks]
            problems += [f"{one.failure.title}: {one.code_sample}" for one in failures if one is not None]
    assert requests > 500
    assert not problems, "\n".join(problems)
