"""Untrusted artefacts in tar files. Reading one takes no more memory than the length of the body."""

import json
import tarfile
import tempfile
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.models.decoder import Decoder
from i2cl.storage.card import model_card
from i2cl.storage.layout import CARD, DESCRIPTION, FILES, TENSORS

OVERHEAD_BYTES = 16 * 2**20  # of an artefact besides its tensors: description, model card, tar headers
MAX_DESCRIPTION = 2**20  # bytes of the JSON file; parsing takes thirty times as much memory
MAX_HEADER = 2**16  # bytes of the header of the safetensors file
MAX_MEMBERS = 32  # of a tar, including extended headers
MAX_LABELS = 2048
MAX_LABEL_TOKENS = 2 * MAX_LABELS  # tokens of all labels


def max_upload_bytes(decoder: Decoder) -> int:
    """Return the maximum size of a tar file: that of an artefact for this model with `MAX_LABELS` labels and
    word weights for `MAX_LABEL_TOKENS` tokens.
    """
    return OVERHEAD_BYTES + 4 * (2 * decoder.layers * (decoder.d_model + 2) + MAX_LABELS * MAX_LABEL_TOKENS)


def require_finite_in_use(injection: Injection, decoder: Decoder) -> None:
    """Raise RefusalError (422) for tensors that overflow when squared, or when cast to the model's dtype."""
    edit = injection.affine_edit()
    shift, scale = edit.shift.float(), edit.scale.float()
    values = [shift.square().sum(-1), shift.to(decoder.model.dtype), scale.square()]
    values.append(torch.tensor(injection.label_bias or (0.0,)).square())
    if injection.word_weights is not None:
        values.append(injection.word_weights.float().square())
    values += [expert.weights.float().square() for expert in injection.head.experts]
    if not all(tensor.isfinite().all() for tensor in values):
        raise unusable_artefact()


def unusable_artefact(why: str = "its values overflow in this model") -> RefusalError:
    """Return the error for an artefact that cannot score texts."""
    return RefusalError(422, "bad_artefact", f"this artefact cannot be used, {why}", "fit it again")


def unpack(body: bytes) -> Injection:
    """Read the injection in a tar file of a task folder.

    Accepts only regular files with the names of an artefact, with or without ``./``. Headers are parsed one
    by one, because `tarfile.open` follows sparse maps and chains of headers without a limit. Raises
    RefusalError (422) on anything else, or an artefact that cannot be read; OSError if the disk is full.
    """
    members = dict(_members(memoryview(body)))
    if len(members.get(DESCRIPTION, b"")) > MAX_DESCRIPTION:
        raise _refused(f"{DESCRIPTION} is longer than {MAX_DESCRIPTION} bytes")
    if int.from_bytes(members.get(TENSORS, b"")[:8], "little") > MAX_HEADER:
        raise _refused(f"{TENSORS} has a header of more than {MAX_HEADER} bytes")
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
            raise _refused(f"{DESCRIPTION} or {TENSORS} holds invalid values") from None
    if len(injection.task.labels) > MAX_LABELS:
        raise _refused(f"it has {len(injection.task.labels)} labels, but the limit is {MAX_LABELS}")
    return injection


def _members(body: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield the name and the content of each file in a tar."""
    seen: set[str] = set()
    count = start = 0
    while any(block := body[start : start + tarfile.BLOCKSIZE].tobytes()):
        count += 1
        if count > MAX_MEMBERS:
            raise _refused(f"it has more than {MAX_MEMBERS} members")
        try:
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError):
            raise _refused("it is not an uncompressed tar file") from None
        start, size = start + tarfile.BLOCKSIZE, head.size
        if not 0 <= size <= len(body) - start:
            raise _refused(f"{head.name!a} ends before its {size} bytes")
        content = body[start : start + size]
        start += ceil(size / tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        name = head.name.removeprefix("./")
        if head.type in (tarfile.XHDTYPE, tarfile.XGLTYPE) or (head.isdir() and name in {"", "."}):
            continue  # extended headers, such as times with fractions of a second
        if head.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or name not in FILES | {CARD} or name in seen:
            raise _refused(f"it holds {head.name!a}, and only {', '.join(sorted(FILES))} are accepted")
        seen.add(name)
        yield name, content


def _refused(why: str) -> RefusalError:
    hint = "make it with tar -C FOLDER -cf - injection.json injection.safetensors"
    return RefusalError(422, "bad_artefact", f"invalid artefact, {why.rstrip()}", hint)
