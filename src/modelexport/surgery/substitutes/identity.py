"""Replaces a module by nothing: its inputs are passed on unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.nodes import may_be
from modelexport.surgery.edited_tags import EditedTags
from modelexport.surgery.substitutes.substitute import Parts, Site


class Identity:
    """Makes the call return its inputs: for each output the first input of its type and shape."""

    name = "identity"
    keep_body = False

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        nodes = []
        for output in site.interface.outputs:
            fitting = [
                value
                for value in site.interface.inputs
                if value.dtype == output.dtype and may_be(value.shape, output.shape)
            ]
            if not fitting:
                raise UsageError(
                    f"'{site.call}' cannot be an identity: none of its inputs has the type and shape of its output "
                    f"'{output.name}'"
                )
            same = [value for value in fitting if _sizes(value) == _sizes(output)]
            nodes.append(ir.Node("", "Identity", [(same or fitting)[0]]))
        tags.remove_inside(site.call, used)
        return Parts(nodes, [node.outputs[0] for node in nodes])


def _sizes(value: ir.Value) -> list[object]:
    return [] if value.shape is None else [size if isinstance(size, int) else size.value for size in value.shape]
