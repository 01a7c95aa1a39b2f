"""Zip archives of others: what is unpacked, what is refused."""

import stat
import zipfile

import pytest

from fitting import one_line
from i2cl import I2CLError
from i2cl.storage import archive
from i2cl.storage.archive import unpacked


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    def place(library, namespace, subfolder):
        folder = tmp_path / "cache" / library / namespace / subfolder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(archive, "cached_assets_path", place)
    return tmp_path / "cache"


def packed(path, members):
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return path


def test_it_is_unpacked_once_and_anew_where_it_changed(tmp_path):
    path = packed(tmp_path / "a.zip", {"config.json": "{}", "1_Pooling/": "", "1_Pooling/config.json": "[]"})
    folder = unpacked(path, "model")
    files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
    assert files == ["1_Pooling/config.json", "config.json"]
    (folder / "config.json").write_text("touched")
    assert unpacked(path, "model") == folder
    assert (folder / "config.json").read_text() == "touched"
    packed(path, {"config.json": "{ }"})
    assert unpacked(path, "model") != folder
    assert (unpacked(path, "model") / "config.json").read_text() == "{ }"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../x.json", "leaves the folder"),
        ("/x.json", "leaves the folder"),
        ("a\\..\\x.json", "leaves the folder"),
        ("C:x.json", "leaves the folder"),
        ("model.bin", r"is none of \.json"),
        ("code.py", r"is none of \.json"),
    ],
)
def test_a_member_that_is_not_to_be_written(name, message, tmp_path, cache):
    path = packed(tmp_path / "a.zip", {"config.json": "{}", name: "x"})
    one_line(f"is not unpacked: its member .* {message}", unpacked, path, "model")
    assert not list(cache.rglob("*.json"))


def test_links_and_bombs_are_refused(tmp_path, monkeypatch):
    link = zipfile.ZipInfo("config.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as opened:
        opened.writestr(link, "/etc/passwd")
    one_line("is a link", unpacked, tmp_path / "link.zip", "model")
    monkeypatch.setattr(archive, "MOST_BYTES", 10)
    with pytest.raises(I2CLError, match="its members take more than 10 bytes"):
        unpacked(packed(tmp_path / "large.zip", {"config.json": "x" * 11}), "model")


@pytest.mark.parametrize("damage", ["none", "cut", "spoiled"])
def test_an_archive_that_is_none(damage, tmp_path, cache):
    path = packed(tmp_path / "a.zip", {"config.json": "{}" * 50})
    whole = path.read_bytes()
    spoiled = whole.replace(b"{}{}", b"[][]", 1)
    path.write_bytes({"none": b"{}", "cut": whole[:-30], "spoiled": spoiled}[damage])
    one_line("is no zip archive, or damaged", unpacked, path, "model")
    assert not list(cache.rglob("*.json"))
