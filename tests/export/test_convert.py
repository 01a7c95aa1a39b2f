"""Pickled weights as safetensors, and pickles that would run code."""

import io
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from compressed import golden
from fitting import one_line
from i2cl import Decoder
from i2cl.export import convert

RELEASE = golden("autocompressor-opt")
FIRST, SECOND = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
INDEX = "pytorch_model.bin.index.json"


class Trap:
    """Makes a folder when it is loaded by a loader that runs what pickles hold."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pickled(tmp_path):
    """The release as it is published: two shards of pickles beside configuration and tokenizer."""
    folder = tmp_path / "pickled"
    RELEASE.decoder().model.config.save_pretrained(folder)
    RELEASE.decoder().tokenizer.save_pretrained(folder)
    tensors = list(load_file(RELEASE.folder / "model.safetensors").items())
    parts = {FIRST: tensors[:20], SECOND: tensors[20:]}
    for name, part in parts.items():
        torch.save(dict(part) | {"steps": 0.0}, folder / name)
    homes = {key: name for name, part in parts.items() for key, _ in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    return folder


def test_shards_give_equal_scores(pickled, tmp_path):
    files = convert(pickled, tmp_path / "new")
    assert [path.name for path in files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    decoder = Decoder.from_pretrained(str(tmp_path / "new"), device="cpu")
    found = RELEASE.fitted(decoder, "autocompressor").scores(RELEASE.record["queries"])
    expected = RELEASE.fitted(RELEASE.decoder(), "autocompressor").scores(RELEASE.record["queries"])
    assert torch.equal(found, expected)
    assert not list((tmp_path / "new").glob("*.bin*"))


def test_a_single_file_with_tied_weights(tmp_path):
    (tmp_path / "old").mkdir()
    table = torch.randn(4, 3)
    torch.save({"a": table, "b": table, "c": table.T}, tmp_path / "old" / "pytorch_model.bin")
    (file,) = convert(tmp_path / "old", tmp_path / "new")
    found = load_file(file)
    assert file.name == "model.safetensors"
    for name, expected in (("a", table), ("b", table), ("c", table.T)):
        assert torch.equal(found[name], expected)


def test_a_pickle_that_would_run_code_is_refused(pickled, tmp_path):
    torch.save({"weight": Trap(tmp_path / "ran")}, pickled / SECOND)
    one_line("would run code when loaded", convert, pickled, tmp_path / "new")
    told = r"holds only pickle weights .*: `i2cl convert .* NEW` rewrites them"
    one_line(told, Decoder.from_pretrained, str(pickled))
    icae = golden("icae-v1")
    torch.save({"memory_token_embed.weight": Trap(tmp_path / "ran")}, tmp_path / "icae.pt")
    given = {"compressor": str(tmp_path / "icae.pt")}
    one_line("would run code when loaded", icae.fitted, icae.decoder(), "icae", **given)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "command", ["convert {pickled} {new}", "eval {pickled} mood-colour-1 --method autocompressor --limit 2"]
)
def test_the_commands_refuse_it_in_one_line(pickled, tmp_path, refused, command):
    torch.save({"weight": Trap(tmp_path / "ran")}, pickled / FIRST)
    assert "run code when loaded" in refused(*command.format(pickled=pickled, new=tmp_path / "new").split())
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


SPARSE = io.BytesIO()
torch.save({"a": torch.eye(3).to_sparse()}, SPARSE)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (SECOND, None, "holds no pytorch_model-00002"),
        (INDEX, b"{", "index.json' is damaged"),
        (INDEX, None, "holds no pytorch_model.bin"),
        (FIRST, b"x", "is damaged, or would"),
        (INDEX, b'{"weight_map": {"a": "../other.bin"}}', "holds no other.bin"),
        (INDEX, b'{"weight_map": {}}', "index.json' is damaged"),
        (INDEX, b'{"weight_map": {"a": 5}}', "index.json' is damaged"),
        (FIRST, SPARSE.getvalue(), "give plain, dense weights"),
    ],
)
def test_what_is_no_such_folder_is_refused_and_nothing_written(pickled, tmp_path, name, content, told):
    (pickled / name).unlink() if content is None else (pickled / name).write_bytes(content)
    one_line(told, convert, pickled, tmp_path / "new")
    assert not (tmp_path / "new").exists()
