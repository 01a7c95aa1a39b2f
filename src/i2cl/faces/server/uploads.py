"""An artefact out of a tar file that anybody may have made: looked at before anything of it is written."""

import io
import tarfile
import tempfile
from pathlib import Path

from i2cl.core.artefact import FILES
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.faces.server.refusals import RefusalError
from i2cl.faces.server.tasks import refused_artefact
from i2cl.models.decoder import Decoder
from i2cl.storage.card import CARD

_ROOM = 16 * 2**20
"""Bytes of an artefact beside its vectors: description, card, a read-out, what tar adds."""


def most_bytes(decoder: Decoder) -> int:
    """The longest tar file of an artefact of this model that is read at all."""
    return _ROOM + 4 * 2 * decoder.layers * (decoder.d_model + 2)


def unpacked(body: bytes) -> Injection:
    """The injection in a tar file of an artefact's folder.

    Only its own files are taken, flat or behind ``./``; none is written under a name that the tar gives.

    Raises:
        RefusalError: 422 on anything else in it, or an artefact that cannot be read.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir() and name in {"", "."}:
                    continue
                if not member.isreg() or name not in FILES | {CARD} or name in found:
                    raise _refused(f"it holds {member.name!a}, which is none of {', '.join(sorted(FILES))}")
                file = tar.extractfile(member)
                found[name] = b"" if file is None else file.read()
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, I2CLError):
            raise
        raise _refused("it is no uncompressed tar file") from None
    with tempfile.TemporaryDirectory() as scratch, refused_artefact():
        folder = Path(scratch) / "upload"
        folder.mkdir()
        for name in FILES & found.keys():
            (folder / name).write_bytes(found[name])
        try:
            return Injection.from_pretrained(folder)
        except I2CLError as error:
            raise _refused(str(error).replace(f"{folder}/", "").replace(str(folder), "upload")) from None


def _refused(why: str) -> RefusalError:
    cure = "make it with tar -C FOLDER -cf - injection.json injection.safetensors"
    return RefusalError(422, "bad_artefact", f"this is no artefact, {why.rstrip()}: {cure}")
