"""The playground's files as they are served: a static shell, the same for everybody, without outside assets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "web"
PAGE = "index.html"

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing but what this server sends is loaded or asked, no markup or style of a model's text can be more than text, and
# no other page can frame this one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: page and scripts are always of one release
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class WebFile:
    """etag: strong, of the content."""

    body: bytes
    media_type: str
    etag: str


def _read(path: Path) -> WebFile:
    body = path.read_bytes()
    return WebFile(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _url(name: str) -> str:
    return "/" if name == PAGE else f"/playground/{name}"


FILES: Mapping[str, WebFile] = {_url(path.name): _read(path) for path in sorted(FOLDER.iterdir()) if path.is_file()}
"""By URL: exactly these, so that no URL can name any other file."""
