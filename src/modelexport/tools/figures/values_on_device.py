"""All values of a file as a device computes them: each is an output there, so that nothing is fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.errors import RunError
from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import fill_types
from modelexport.runtime.runner_process import RunnerProcess, write_for_runner


def values_there(model: ir.Model, process: RunnerProcess, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the tensors that the nodes of the main graph compute, to their arrays.

    Raises:
        RunError: The device does not run the model.
    """
    copy = copy_of(model)
    fill_types(copy)
    computed = [value for node in copy.graph if node.op_type != "Constant" for value in node.outputs if value.name]
    copy.graph.outputs[:] = [v for v in computed if isinstance(v.type, ir.TensorType) and v.dtype is not None]
    names = dict.fromkeys(value.name or "" for value in copy.graph.outputs)
    folder = process.folder
    written = write_for_runner(copy, feeds, names, folder, name="values", stem=f"values_{process.measured}")
    result = process.run_model(folder, written)
    if result.status != "ran":
        raise RunError(f"the file does not run on {process.device}: {result.message}")
    return {output["name"]: np.load(folder / output["save"]) for output in written["outputs"]}
