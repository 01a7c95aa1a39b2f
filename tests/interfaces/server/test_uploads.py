"""Untrusted uploads: accepted and refused tar files and artefacts, and memory use."""

import io
import json
import tarfile
import tracemalloc
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load, save

from i2cl.interfaces.server import files as of_texts
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.uploads import MAX_DESCRIPTION, MAX_LABELS, require_finite_in_use, unpack
from i2cl.models.scoring import NotFiniteError

from .conftest import LINES, TAR, catch_refusal, make_injection

BLOCK = tarfile.BLOCKSIZE
CLAIM = 4 * 2**30


@pytest.fixture
def files(decoder, tmp_path):
    """Contents of the files of an artefact, by name."""
    make_injection(decoder, 0).save_pretrained(tmp_path / "good")
    return {name: (tmp_path / "good" / name).read_bytes() for name in ("injection.json", TENSORS)}


TENSORS = "injection.safetensors"


def member(name, content=b"", kind=tarfile.REGTYPE, size=None, fields=()):
    """Return a tar member whose header may state a wrong size; ``fields``: (offset, bytes) to overwrite."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, 0
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    size = len(content) if size is None else size
    whole = size.to_bytes(12, "big", signed=True)
    for place, value in ((124, whole if size < 0 else b"\x80" + whole[1:]), *fields, (148, b" " * 8)):
        head[place : place + len(value)] = value
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content + bytes(-len(content) % BLOCK)


def tar(contents):
    return b"".join(member(name, content) for name, content in contents.items()) + bytes(2 * BLOCK)


def pax(message):
    lines = b"".join(b"%d %s\n" % (len(line) + 3 + (len(line) > 96), line) for line in message)
    return member("pax", lines, tarfile.XHDTYPE)


def sparse_old():
    """Return an old-style GNU sparse member that claims four gigabytes."""
    claim = ((386, b"%011o\0" % (CLAIM - BLOCK)), (483, b"\x80" + CLAIM.to_bytes(11, "big")))
    return member(TENSORS, kind=tarfile.GNUTYPE_SPARSE, fields=claim)


SPARSE = {
    "old": sparse_old(),
    "0.1": pax([b"GNU.sparse.size=%d" % CLAIM, b"GNU.sparse.map=0,0"]) + member(TENSORS),
    "1.0": pax([b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=%d" % CLAIM])
    + member(TENSORS, (b"1\n%d\n%d\n" % (CLAIM - BLOCK, BLOCK)).ljust(2 * BLOCK, b"\0")),
}


@contextmanager
def peak_below(limit):
    """Assert that the block never takes more memory than this."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_members_are_refused_without_using_memory(files, kind):
    body = member("injection.json", files["injection.json"]) + SPARSE[kind] + bytes(2 * BLOCK)
    with peak_below(2**22):
        refused = catch_refusal("", unpack, body)
    assert (refused.status, refused.code) == (422, "bad_artefact")


KINDS = [getattr(tarfile, f"{kind}TYPE") for kind in ("LNK", "SYM", "CHR", "BLK", "FIFO", "CONT")]
OTHERS = [*((TENSORS, kind) for kind in KINDS), ("other.txt", tarfile.REGTYPE)]
OTHERS += [(f"{way}{TENSORS}", tarfile.REGTYPE) for way in ("../", "/", "a/")]


@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_unexpected_tar_members_are_refused(files, name, kind):
    body = member("injection.json", files["injection.json"]) + member(name, kind=kind)
    catch_refusal("are accepted", unpack, body)


def test_invalid_artefacts_are_refused(files):
    good, record = tar(files), json.loads(files["injection.json"])
    for front in (b"", pax([b"mtime=1.5"])):  # extended headers with times are ignored
        assert unpack(front + good).task.name == "films"
    bodies = [b"", b"PK\x03\x04 a zip", good[:700], tar({}), tar({"injection.json": b"{}"})]
    changes = [record | {"format_version": 99}, record | {"more": 1}, record]
    bodies += [tar({"injection.json": json.dumps(one).encode()}) for one in changes]
    for body in bodies:
        refused = catch_refusal("invalid artefact", unpack, body)
        assert (refused.status, "/tmp" in str(refused)) == (422, False)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE])
@pytest.mark.parametrize("size", [2**60, 1, -1, -BLOCK, -(2**40)])
def test_member_size_beyond_the_body_is_refused(kind, size):
    name = "." if kind == tarfile.DIRTYPE else "injection.json"
    catch_refusal("ends before", unpack, member(name, kind=kind, size=size))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (pax([b"mtime=1.5"]) * 2000, "more than 32 members"),
        (member("./", kind=tarfile.DIRTYPE) * 2000, "more than 32 members"),
        (member("injection.json", b" " * (MAX_DESCRIPTION + 1)), "longer than"),
        (member(TENSORS, (2**24).to_bytes(8, "little") + bytes(2**24)), "header of more than"),
    ],
    ids=["chain", "folders", "description", "header"],
)
def test_oversized_headers_and_descriptions_are_refused(files, head, message):
    catch_refusal(message, unpack, head + bytes(2 * BLOCK))


def modified(files, tensors=None, message=None):
    values, description = load(files[TENSORS]), json.loads(files["injection.json"])
    (tensors or dict)(values)
    (message or dict)(description)
    return tar({"injection.json": json.dumps(description).encode(), TENSORS: save(values)})


def fill(name, value, dtype=torch.float32):
    return lambda values: values.update({name: torch.full_like(values[name], value, dtype=dtype)})


TENSORS_REFUSED = {
    "3e37": fill("context_vector", 3e37),
    "3e37 of lambda": fill("coefficients", 3e37),
    "one 3e37": lambda values: values["context_vector"].view(-1)[:1].fill_(3e37),
    "1e300": fill("context_vector", 1e300, torch.float64),
    "nan": fill("context_vector", float("nan")),
    "float8": fill("context_vector", 0.5, torch.float8_e4m3fn),
    "int": fill("context_vector", 1, torch.int64),
}
TOLD_REFUSED = {
    "history nan": {"history": [float("nan")]},
    "settings inf": {"settings": {"steps": float("inf")}},
    "evaluation": {"evaluation": {"a": 1}},
    "labels": {"task": {"name": "a", "labels": [f"l{at}" for at in range(MAX_LABELS + 1)]}},
    "bias": {"label_bias": [1e308, 0.0]},
}


@pytest.mark.parametrize("kind", [*TENSORS_REFUSED, *TOLD_REFUSED])
def test_artefacts_with_invalid_values_are_refused(shared_client, shared_service, files, kind):
    def message(description):
        change = TOLD_REFUSED.get(kind, {})
        task = {**description["task"], **change.get("task", {})}
        description.update({**change, "task": task})

    before = shared_service.tasks.entries()
    body = modified(files, TENSORS_REFUSED.get(kind), message)
    reply = shared_client.put("/v1/tasks/new", content=body, headers=TAR)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "bad_artefact")
    assert shared_service.tasks.entries() == before
    assert shared_client.put("/v1/tasks/new", content=tar(files), headers=TAR).status_code == 200


def test_overflowing_word_weights_are_refused(service, files):
    plain = unpack(tar(files)).with_head(scoring="words")
    for size in (1.0, 3e37):
        heavy = plain.with_head(word_weights=torch.full((3, 2), size))
        with nullcontext() if size == 1 else pytest.raises(RefusalError, match="overflow in this model"):
            require_finite_in_use(heavy, service.decoder)


def test_upload_with_nan_scores_is_refused(client, service, files, monkeypatch):
    fails = Mock(side_effect=NotFiniteError("label scores are not numbers"))
    monkeypatch.setattr(service.batcher.pool, "score_rows", fails)
    reply = client.put("/v1/tasks/new", content=tar(files), headers=TAR)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "bad_artefact")
    assert [entry.name for entry in service.tasks.entries()] == ["films"]


def test_batch_file_is_checked_line_by_line(client, service, monkeypatch):
    class Nowhere(io.RawIOBase):
        def write(self, data):
            return len(data)

    def read(body):
        return of_texts.read_lines(io.BytesIO(body), "films", service.tasks.entry, Nowhere())[:2]

    line = b'{"input":"%s"}\n' % (b"a" * 100)
    body = line * 6_000
    assert read(b"\xef\xbb\xbf" + line) == (1, ["films"])
    with peak_below(2**20):  # all lines as str and dict would take twice as much
        assert read(body) == (6_000, ["films"])
    assert len(catch_refusal("", read, b'{"inpt":"a"}\n' * 3_000).rows) == of_texts.MAX_ERRORS
    catch_refusal("line 1: the line is longer", read, json.dumps({"input": "a" * of_texts.MAX_LINE}).encode())
    seen = []
    monkeypatch.setattr(of_texts, "read_lines", lambda *_: seen.append(service.tasks._writing._is_owned()))
    client.post("/v1/batches", content=b"", headers=LINES)
    assert seen == [False]
