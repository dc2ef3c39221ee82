"""What a fused decoder reads of its cache: nothing but its content, so that the cache may be a longer buffer."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.exporting.fused_decoders import reads_cache, tidy_fused
from modelexport.graph.undetermined_ranks import forget_undetermined_ranks

DECODER = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
decoder (
    float[batch, sequence, 16] states, int64[batch, sequence] input_ids, int32[batch] last, int32 total,
    float[batch, 1, past, 16] past_key, float[batch, 1, past, 16] past_value
) => (
    float[batch, sequence, 16] y, float[batch, 1, all, 16] key, float[batch, 1, all, 16] value, int64[1] rows
) {
    y, key, value = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1>(
        states, states, states, past_key, past_value, last, total
    )
    rows = Shape<start=0, end=1>(past_value)
}
"""


def test_the_number_of_rows_is_read_from_another_input_than_the_cache() -> None:
    model = ir.from_onnx_text(DECODER)
    tidy_fused(model)
    caches = [value for value in model.graph.inputs if value.name in ("past_key", "past_value")]
    assert all(reads_cache(*use) for value in caches for use in value.uses())


def test_the_number_of_axes_that_an_attention_returns_does_not_depend_on_that_of_the_length() -> None:
    text = DECODER.replace("int32 total", "int32[n] totals").replace(
        "    y, key", "    total = Squeeze(totals)\n    y, key"
    )
    assert forget_undetermined_ranks(ir.from_onnx_text(text)) == []
