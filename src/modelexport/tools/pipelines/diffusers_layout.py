"""The files of a package that diffusers loads: its index, configurations, tokenizers, schedulers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelexport.core.collected_messages import collected
from modelexport.packages.configs_and_tokenizers import write_json
from modelexport.packages.model_parts import ModelPart
from modelexport.tools.pipelines.components_module import MODEL_INDEX


def write_diffusers_layout(pipeline: Any, folder: Path, parts: Sequence[ModelPart]) -> None:
    """The layout of diffusers: its index, the configuration of each part's model, tokenizers, schedulers, ..."""
    with collected():
        pipeline.save_config(folder)
        for part in parts:
            component = pipeline.components[part.module]
            config = component if hasattr(component, "save_config") else component.config
            save = getattr(config, "save_config", None) or config.save_pretrained
            save((folder / part.path).parent)
        modules = {part.module for part in parts}
        missing: list[str] = []
        for name, component in pipeline.components.items():
            if hasattr(component, "state_dict") and hasattr(component, "forward"):
                missing += [name] if name not in modules else []
            elif hasattr(component, "save_pretrained"):
                component.save_pretrained(folder / name)
    index = json.loads((folder / MODEL_INDEX).read_text(encoding="utf-8"))
    write_json(folder / MODEL_INDEX, index | {name: [None, None] for name in missing})
