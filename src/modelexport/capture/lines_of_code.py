"""The line of the model's code that makes a node: ``transformers.models.bert.modeling_bert:354``, never a path.

It is the innermost line of the model's own code. Code of other installed packages, such as einops, is not the model's:
the line that calls it is told.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import nn

from modelexport.capture.failure_hints import is_of_exporter
from modelexport.capture.patches import private, usable
from modelexport.core.text import name_of_code
from modelexport.format import keys
from modelexport.pytorch.runs.questions_of_values import frames_of_model, is_module_of_model

LINE_KEY = keys.LINE
"""The annotation of an FX node with its line."""

_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
_FRONT_ENDS = str(Path(__file__).with_name("front_ends.py"))
"""The file that calls the model: frames outside of it do not belong to the model."""
_GENERATED = "<eval_with_key>"
"""The beginning of the file names that ``torch.fx`` gives to code that it generates."""
_FRAME = re.compile(r"^(.*)\((\d+)\): ", re.MULTILINE)
_Place = tuple[str, int]
"""A file of code and the number of a line."""


class LinesOfCode:
    """Finds the line of the model's code that runs.

    Args:
        model: Code is the model's if it is in a package of its modules' classes, or in a file that is not installed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
        self._texts: dict[_Place, str] = {}

    def noting(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method with which ``torch.fx`` creates a node, so that each node gets its line of code."""

        def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
            node = create(tracer, kind, *args, **kwargs)
            custom = node.meta.get("custom") or {}
            # Decomposition and the bodies of branches make nodes of nodes that have lines.
            if kind == "call_function" and LINE_KEY not in custom and (line := self.running()):
                node.meta["custom"] = {**custom, LINE_KEY: line}
            return node

        return create_node

    def running(self) -> str:
        """The line that runs, or that dynamo interprets; empty if no code of the model runs."""
        if usable("interpreted frames") and (stack := private("interpreted frames")()):
            return self.innermost((f.filename, f.lineno or 0) for f in reversed(stack) if not is_of_exporter(f))
        places = ((f.f_code.co_filename, f.f_lineno) for f in frames_of_model(sys._getframe(1)))
        return self.innermost(places)

    def traced(self, stack: str) -> str:
        """The line of a stack of ``torch.jit``, the innermost frame first: ``/home/me/net.py(12): forward``."""
        frames = itertools.takewhile(lambda frame: frame[0] != _FRONT_ENDS, _FRAME.findall(stack))
        return self.innermost((file, int(number)) for file, number in frames)

    def innermost(self, places: Iterable[_Place]) -> str:
        """The line of the first place that is of the model's code; empty if none is."""
        return next((text for place in places if (text := self._text(place))), "")

    def _text(self, place: _Place) -> str:
        if place not in self._texts:
            file, number = place
            module = "" if file.startswith(_GENERATED) else _module_of(file)
            own = module.partition(".")[0] in self._packages or not file.startswith(_INSTALLED)
            self._texts[place] = f"{module}:{number}" if own and is_module_of_model(module) else ""
        return self._texts[place]


@functools.cache
def _module_of(file: str) -> str:
    """The name of the module that was imported from a file; of a script or a cell of a notebook, its own."""
    for name, module in list(sys.modules.items()):
        if name not in ("__main__", "__mp_main__") and getattr(module, "__dict__", {}).get("__file__") == file:
            return name
    return PureWindowsPath(name_of_code(file)).stem  # of a class that was pickled there, too
