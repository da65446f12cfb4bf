"""SECURITY.md names a test for each threat; here that those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_threat_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    for row in rows:
        threat, _, named = (cell.strip() for cell in row.strip("|").split("|"))
        path = ""
        names = re.findall(r"`([\w/.]*)::(\w+)`", named)
        assert names, f"no test for: {threat}"
        for given, name in names:
            path = given or path
            tree = ast.parse((ROOT / path).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in functions, f"{path} has no {name}"
