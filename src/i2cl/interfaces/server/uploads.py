"""Artefacts that come as tar files: what is taken of them, in memory that the body's length bounds."""

import json
import tarfile
import tempfile
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch

from i2cl.core.artefact import DESCRIPTION, FILES, TENSORS
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.models.decoder import Decoder
from i2cl.storage.card import CARD, model_card

ROOM = 16 * 2**20  # bytes of an artefact beside its tensors: description, card, what tar adds
MOST_TOLD = 2**20  # bytes of a description, which takes thirty times as many while it is read
MOST_HEADER = 2**16  # bytes in which the file of tensors says what it holds
MOST_MEMBERS = 32  # of a tar, with what it tells of files beside them
MOST_LABELS = 2048
MOST_WORDS = 2 * MOST_LABELS  # tokens that tell these


def most_bytes(decoder: Decoder) -> int:
    """The longest tar file of an artefact of this model that is read at all, with a weight for each of
    `MOST_LABELS` and each of `MOST_WORDS`.
    """
    return ROOM + 4 * (2 * decoder.layers * (decoder.d_model + 2) + MOST_LABELS * MOST_WORDS)


def require_moderate(injection: Injection, decoder: Decoder) -> None:
    """Refuse (422) numbers whose squares, or they in the model's precision, are infinite."""
    amount, keep = injection.coefficients.float().unbind(-1)
    scaled = amount[..., None] * injection.context.values.float()
    weights = torch.zeros(1) if injection.word_weights is None else injection.word_weights.float()
    encoder = torch.zeros(1) if injection.encoder_bias is None else injection.encoder_bias.weights.float()
    squares = (torch.tensor(injection.label_bias or (0.0,)), keep, weights, encoder)
    of_vectors = (scaled.square().sum(-1), scaled.to(decoder.model.dtype))
    for values in (*of_vectors, *(one.square() for one in squares)):
        if not values.isfinite().all():
            raise unusable()


def unusable(why: str = "its numbers are not finite when they are used") -> RefusalError:
    """What answers no text."""
    return RefusalError(422, "bad_artefact", f"this artefact cannot be used, {why}: fit it again")


def unpack(body: bytes) -> Injection:
    """The injection in a tar file of an artefact's folder.

    Only its own files are taken, plain and whole, flat or behind ``./``; none is written under a name that
    the tar gives. Headers are read one by one: `tarfile.open` follows sparse maps and chains of headers as
    far as they go. Raises RefusalError: 422 on anything else in it, or an artefact that cannot be read;
    OSError where there is no room for it.
    """
    members = dict(_members(memoryview(body)))
    if len(members.get(DESCRIPTION, b"")) > MOST_TOLD:
        raise _refused(f"{DESCRIPTION} is longer than {MOST_TOLD} bytes")
    if int.from_bytes(members.get(TENSORS, b"")[:8], "little") > MOST_HEADER:
        raise _refused(f"{TENSORS} has a header of more than {MOST_HEADER} bytes")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "upload"
        folder.mkdir()
        for name in FILES & members.keys():
            (folder / name).write_bytes(members[name])
        try:
            injection = Injection.from_pretrained(folder)
            description = injection.description()
            json.dumps(description, allow_nan=False, ensure_ascii=False).encode()
            model_card(description, "upload")
        except I2CLError as error:
            raise _refused(str(error).replace(f"{folder}/", "").replace(str(folder), "upload")) from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            raise _refused(f"{DESCRIPTION} or {TENSORS} holds values that no artefact has") from None
    if len(injection.task.labels) > MOST_LABELS:
        raise _refused(f"it has {len(injection.task.labels)} labels, and {MOST_LABELS} is the most")
    return injection


def _members(body: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Each file in a tar with its content."""
    seen: set[str] = set()
    count = start = 0
    while any(block := body[start : start + tarfile.BLOCKSIZE].tobytes()):
        count += 1
        if count > MOST_MEMBERS:
            raise _refused(f"it has more than {MOST_MEMBERS} members")
        try:
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError):
            raise _refused("it is no uncompressed tar file") from None
        start, size = start + tarfile.BLOCKSIZE, head.size
        if not 0 <= size <= len(body) - start:
            raise _refused(f"{head.name!a} ends before its {size} bytes")
        content = body[start : start + size]
        start += ceil(size / tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        name = head.name.removeprefix("./")
        if head.type in (tarfile.XHDTYPE, tarfile.XGLTYPE) or (head.isdir() and name in {"", "."}):
            continue  # such as times to a fraction of a second
        if head.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or name not in FILES | {CARD} or name in seen:
            raise _refused(f"it holds {head.name!a}, which is none of {', '.join(sorted(FILES))}")
        seen.add(name)
        yield name, content


def _refused(why: str) -> RefusalError:
    cure = "make it with tar -C FOLDER -cf - injection.json injection.safetensors"
    return RefusalError(422, "bad_artefact", f"this is no artefact, {why.rstrip()}: {cure}")
