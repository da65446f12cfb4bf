"""One chat request with n=2 to the server at argv[1]; fails unless two choices with text come back."""

import json
import os
import sys
import urllib.request


def call(path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["Authorization"] = f"Bearer {key.strip()}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, data, headers), timeout=100) as answer:
        return json.load(answer)


model = call("/v1/models")["data"][0]["id"]
message = {"role": "user", "content": "Say hello."}
choices = call("/v1/chat/completions", {"model": model, "messages": [message], "n": 2, "max_tokens": 8})["choices"]
assert [choice["index"] for choice in choices] == [0, 1], choices
assert all(choice["message"]["content"] for choice in choices), choices
sys.stdout.write(f"{model}: two choices\n")
