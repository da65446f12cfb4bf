"""The chart's tests run under `.ci/helm`, which names the folder of their tools.

Under `./deploy/test` there are no tools: only test_values.py, which needs none, is collected there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TOOLS = os.environ.get("HELM_TOOLS")

if TOOLS is None:
    collect_ignore = [str(path) for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_values.py"]
else:
    sys.path.append(f"{TOOLS}/site")  # behind the project's own packages
