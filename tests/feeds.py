"""Random inputs for several runs of an exported case, and how far two outputs are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from exports import ExportedCase
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import read_tagged


def feeds_of(case: ExportedCase, count: int = 4) -> list[dict[str, Any]]:
    tagged, session = read_tagged(case.path), open_session(case.path)
    return [make_random_inputs(tagged.model, session, seed=seed) for seed in range(count)]


def apart(first: Any, other: Any) -> float:
    return float(np.linalg.norm(first - other) / np.linalg.norm(first))
