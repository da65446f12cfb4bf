"""What a client sends is data: nothing of it is fetched, opened, run or turned into objects (C35, C37)."""

from __future__ import annotations

import ast
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.apps import check_error, serving

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Canary:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.hits = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.hits += 1
            connection.close()

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.recv(1)  # its end: this one has been counted, and so has whoever came before
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(10)


@pytest.fixture
def canary() -> Iterator[Canary]:
    made = Canary()
    yield made
    if made.listener.fileno() >= 0:
        made.close()


WATCHED = {"open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"}
_watching: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is not None and event in (
        "open",
        "socket.connect",
        "socket.getaddrinfo",
        "subprocess.Popen",
        "os.system",
    ):
        _watching.append(f"{event} {arguments[:2]}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What the process opens, connects to, resolves or starts meanwhile."""
    global _watching
    if not getattr(sys, "_chorus_audit", False):
        sys.addaudithook(_audit)
        sys._chorus_audit = True  # type: ignore[attr-defined]
    seen: list[str] = []
    _watching = seen
    try:
        yield seen
    finally:
        _watching = None


def urls(port: int) -> list[str]:
    return [
        f"http://127.0.0.1:{port}/a.png",
        f"http://2130706433:{port}/a.png",
        f"http://[::1]:{port}/a.png",
        f"http://[::ffff:127.0.0.1]:{port}/a.png",
        f"http://localhost:{port}/a.png",
        "file:///etc/passwd",
        "data:image/png;base64," + "A" * 100_000,
    ]


def test_no_url_is_ever_fetched(canary: Canary) -> None:
    with serving() as client:
        client.get("/v1/models")
        for url in urls(canary.port):
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "file", "file": {"file_data": url}},
            ):
                body = {"model": "org/m", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
                with watched() as seen:
                    check_error(client.post(CHAT, json=body), 400)
                assert seen == []
            text = {"model": "org/m", "messages": [{"role": "user", "content": url}], "max_tokens": 1}
            with watched() as seen:
                client.post(CHAT, json=text)
            assert seen == []
    canary.close()
    assert canary.hits == 1


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "a/b\0",
    "org/evil",
    "org/m ",
    "ORG/M",
    "",
    "org/m/..",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_the_served_one_is_404_and_looked_for_nowhere(name: str) -> None:
    with serving() as client:
        client.get("/v1/models")
        for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
            with watched() as seen:
                check_error(client.post(path, json={"model": name, **prompt}), 404, "model", "model_not_found")
            assert seen == []


BINARY = "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAh0b3VjaCAveJSFlFKULg=="


@pytest.mark.parametrize("field", ["prompt_embeds", "input_embeds", "lora_path", "model_path", "cache"])
def test_fields_that_elsewhere_carry_objects_or_code_are_refused_by_name(field: str) -> None:
    with serving() as client:
        for value in (BINARY, [BINARY], {"data": BINARY}, "{{ ''.__class__.__mro__ }}"):
            for path, prompt in (
                (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
                (COMPLETIONS, {"prompt": "x"}),
            ):
                body = {"model": "org/m", "max_tokens": 1, field: value, **prompt}
                with watched() as seen:
                    check_error(client.post(path, json=body), 400, field, "unknown_parameter")
                assert seen == []


def test_the_source_turns_no_bytes_into_objects() -> None:
    """Neither pickle nor its relatives, nor anything that runs text."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {"eval", "exec", "compile", "__import__"}
    found = []
    for path in [*(ROOT / "service").rglob("*.py"), *(ROOT / "engine").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                name = next((one for one in names if one.split(".")[0] in modules), "")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                name = node.func.id
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                name = name if name in ("torch.load", "numpy.load", "np.load", "yaml.load", "os.system") else ""
            if name:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert found == []


def test_a_client_has_no_regex_engine_but_the_linear_one() -> None:
    """`re` sees clients' text with patterns of ours only: constants, or words that are escaped."""
    found = []
    for path in (ROOT / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if (
                isinstance(owner, ast.Name)
                and owner.id == "re"
                and node.func.attr in ("compile", "fullmatch", "search")
            ):
                if "re.escape" in ast.unparse(node):
                    continue
                names = {inner.id for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Name)}
                if not all(name.isupper() or name in ("re", "map", "self") for name in names):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert found == []
