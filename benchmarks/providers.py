"""Modules on two real execution providers: ONNX Runtime's CPU provider, and OpenVINO's, whose device is the CPU too.

    pip install --no-deps --target APART onnxruntime-openvino==1.24.1
    PYTHONPATH=APART OMP_NUM_THREADS=1 python benchmarks/providers.py FILE.onnx SELECTOR...

First with `place`, which sends the first SELECTOR to OpenVINO and the rest to the CPU, by annotation, and reads back
where each node went. onnxruntime-openvino 1.24.1 reports that, and does not know the setting that places by annotation
(ONNX Runtime 1.31 does), so that OpenVINO takes all nodes, and `place` has to name the modules that went elsewhere.
Then with `split`, a stage beginning at each SELECTOR, and a session for each stage, every other one on OpenVINO: every
node has to be where it should, and the chain has to give what the whole gives on the CPU. Seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import modelexport
from modelexport.runtime.devices import CPU, find_device
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.devices.placing import assigned_providers

OTHER = "OpenVINOExecutionProvider"


def main() -> None:
    """Print where nodes went; fails if one of a stage is not where it should be, or the outputs differ."""
    if len(sys.argv) < 3:
        print("benchmarks/providers.py: left out, give FILE.onnx and SELECTOR...")
        return
    file, selectors = Path(sys.argv[1]), sys.argv[2:]
    tagged = modelexport.load(file)
    placement = modelexport.place(tagged, [f"{CPU}: .", f"{OTHER}: {selectors[0]}"], providers=[OTHER])
    elsewhere = ", ".join(f"{call.call or '.'}" for call in placement.faults)
    print(f"place: {placement.nodes}; elsewhere or torn apart: {elsewhere or 'nothing'}")
    feeds = make_random_inputs(tagged.model, open_session(file))
    expected = run_session(open_session(file), feeds)
    wrong = 0
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        result = modelexport.split(tagged, Path(folder, "stages"), at=selectors)
        providers = {stage.file: OTHER if index % 2 else CPU for index, stage in enumerate(result.stages)}
        for stage in result.stages:
            provider = providers[stage.file]
            found = assigned_providers(
                Path(folder, "stages", stage.file), "", list(map(find_device, dict.fromkeys([provider, CPU])))
            )
            there = sum(where == provider for where in found.values())
            wrong += len(found) - there
            print(f"{stage.file}: {there} of {len(found)} nodes on {provider} ({', '.join(stage.modules)})")
        made = modelexport.run_chain(
            Path(folder, "stages"), feeds, opened=lambda path: open_session(path, provider=providers[path.name])
        )
    error = max(float(np.abs(made[name] - array).max()) for name, array in expected.items())
    print(f"the chain of both providers differs from the whole on the CPU by {error:.1e}")
    if wrong or error > 1e-4:
        sys.exit(1)


if __name__ == "__main__":
    main()
