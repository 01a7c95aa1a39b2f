"""`i2cl cache` lists and deletes converted models."""

import json

import pytest

from i2cl.storage import model_cache


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """Two entries in a cache that also has a file of the user's and an interrupted conversion."""
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path))
    folder = model_cache.cache_folder()
    for dtype in ("float32", "bfloat16"):
        write = lambda fresh: (fresh / "model.safetensors").write_bytes(bytes(2_000_000))  # noqa: E731
        assert model_cache.add_entry(folder / f"abc-{dtype}", tmp_path / "film.gguf", dtype, 0, write)
    (folder / ".abc-float32-x1").mkdir()
    (folder / "own.gguf").write_text("")
    return folder


def test_cache_lists_file_dtype_and_size(said, entries):
    out = said("cache")
    assert out.count("film.gguf") == 2
    assert "bfloat16" in out
    assert f"2 converted models in {entries}." in out
    record = json.loads(said("cache", "--json"))
    assert record["folder"] == str(entries)
    assert [model["dtype"] for model in record["models"]] == ["bfloat16", "float32"]
    assert all(2_000_000 < model["bytes"] < 2_001_000 for model in record["models"])


def test_clear_deletes_entries_and_leaves_other_files(said, entries):
    assert said("cache", "--clear") == f"Deleted 2 converted models from {entries}.\n"
    assert [path.name for path in entries.iterdir()] == ["own.gguf"]
    assert said("cache") == f"0 converted models in {entries}.\n"


def test_missing_folder_is_an_empty_cache(said, tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "none"))
    assert json.loads(said("cache", "--json"))["models"] == []
    assert json.loads(said("cache", "--clear", "--json"))["deleted"] == 0


def test_entry_is_not_created_where_it_would_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path))
    folder = model_cache.cache_folder() / "abc-float32"
    write = lambda fresh: pytest.fail("written")  # noqa: E731
    assert not model_cache.add_entry(folder, tmp_path / "film.gguf", "float32", 2**60, write)
    assert not folder.exists()


def test_default_folder_is_the_platforms_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(model_cache.CACHE_VARIABLE)
    monkeypatch.setattr(model_cache, "user_cache_path", lambda name, **_: tmp_path / name)
    assert model_cache.cache_folder() == tmp_path / "i2cl" / "gguf"
