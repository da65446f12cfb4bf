"""The playground's page and files, open to everybody; what the page asks for needs a key as always."""

from __future__ import annotations

from typing import Any

from litestar import Controller, HttpMethod, Request, route
from litestar.response.base import ASGIResponse

from service.playground import FILES, HEADERS


class PlaygroundController(Controller):
    path = "/"

    @route(list(FILES), http_method=[HttpMethod.GET, HttpMethod.HEAD], sync_to_thread=False)
    def file(self, request: Request[Any, Any, Any]) -> ASGIResponse:
        scope = request.scope
        if scope["path"] == "/" and not scope["raw_path"].endswith(b"/"):
            # under a root path: the page's relative links need its slash
            return ASGIResponse(status_code=308, headers={"Location": f"{scope['root_path']}/"})
        file = FILES[scope["path"]]
        headers = {**HEADERS, "ETag": file.etag}
        if _names(request.headers.get("if-none-match", ""), file.etag):
            return ASGIResponse(status_code=304, headers=headers)
        is_head = request.method == HttpMethod.HEAD
        return ASGIResponse(
            body=b"" if is_head else file.body,
            content_length=len(file.body),
            is_head_response=is_head,
            headers={**headers, "Content-Type": file.media_type, "Content-Length": str(len(file.body))},
        )


def _names(if_none_match: str, etag: str) -> bool:
    """Proxies that compress make a tag weak: the content is the same."""
    return any(given.strip().removeprefix("W/") in (etag, "*") for given in if_none_match.split(","))
