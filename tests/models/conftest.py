"""Puts ``judge`` (one folder up) and ``zoo`` (this folder) within the model tests' reach."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
