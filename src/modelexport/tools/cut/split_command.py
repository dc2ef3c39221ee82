"""`split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.regions import Sharing
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON, SHARING, parsed_sizes

MOST_MEGABYTES = 1e12


By = Literal["bytes", "flops", "time"]


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where stages begin"""

    stages: int | None = option(None, "The number of stages.", metavar="N", least=1)
    max_mb: float | None = option(
        None, "The most weights that a stage may have, in millions of bytes; not with --by flops or time.", metavar="M"
    )
    at: Sequence[str] = option(
        (), "Begin a stage at each of these modules; with --stages, stages may begin only there.", metavar="SELECTOR"
    )
    by: By = option("bytes", "The figure by which stages are balanced.")
    size: Sequence[str] = option((), "The size of a dynamic axis, for --by flops and time.", metavar="NAME=N")

    @property
    def max_bytes(self) -> int | None:
        if self.max_mb is not None and not 0 < self.max_mb < MOST_MEGABYTES:
            raise UsageError(
                f"--max-mb {self.max_mb:g}: give the largest weights of a stage in millions of bytes, such as 500"
            )
        return None if self.max_mb is None else int(self.max_mb * 1e6)


def split(
    file: Path = FILE,
    output: Path = option(..., "The folder to write.", flag="-o --output", metavar="FOLDER", file="written folder"),
    *,
    cuts: Cuts,
    weights: Sharing = SHARING,
    as_json: bool = JSON,
) -> None:
    """Cut FILE at module boundaries into stages that run in sequence."""
    import modelexport
    from modelexport.tools.cut import cut_text

    if cuts.size and cuts.by == "bytes":
        raise UsageError("--size goes with --by flops or --by time")
    result = modelexport.split(
        file,
        output,
        stages=cuts.stages,
        max_bytes=cuts.max_bytes,
        at=cuts.at,
        by=cuts.by,
        sizes=parsed_sizes(cuts.size),
        weights=weights,
    )
    print_result(result, lambda: cut_text.format_split(result), as_json=as_json)
