"""What weights are, read off their tensors."""

from __future__ import annotations

import pytest

from posttrain.runs.detected import Stored, detect, mismatches


def test_plain_floats():
    found = detect([Stored("a.weight", "torch.float32", 300, 1200), Stored("b.weight", "torch.float32", 100, 400)])
    assert found == {
        "dtype": "float32",
        "shares": {"float32": 1.0},
        "quantisation": "none",
        "elements": 400,
        "bytes": 1600,
        "bytes_per_element": 4.0,  # (1200 + 400) / (300 + 100)
    }


def test_of_mixed_floats_the_larger_part_names_the_dtype_and_the_shares_say_so():
    found = detect([Stored("a", "bfloat16", 900, 1800), Stored("norm", "float32", 100, 400)])
    assert (found["dtype"], found["shares"]) == ("bfloat16", {"bfloat16": 0.9, "float32": 0.1})
    assert found["bytes_per_element"] == 2.2  # (1800 + 400) / 1000


NF4 = [
    Stored("q.weight", "uint8", 512, 512),
    Stored("q.weight.absmax", "float32", 16, 64),
    Stored("q.weight.quant_state.bitsandbytes__nf4", "uint8", 80, 80),
]


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (NF4, "bitsandbytes nf4"),
        ([Stored(t.name.replace("nf4", "fp4"), *t[1:]) for t in NF4], "bitsandbytes fp4"),
        ([Stored("q.weight", "int8", 100, 100), Stored("q.SCB", "float32", 4, 16)], "bitsandbytes int8"),
        ([Stored("q.qweight", "int32", 64, 256), Stored("q.scales", "float16", 8, 16)], "packed integers (GPTQ, AWQ)"),
        ([Stored("q.weight_packed", "uint8", 64, 64), Stored("q.weight_scale", "float8_e4m3fn", 8, 8)], "packed 4-bit weights with scales"),
        ([Stored("q.weight", "float8_e4m3fn", 100, 100), Stored("q.weight_scale", "float32", 1, 4)], "float8 weights"),
        ([Stored("q.weight", "int8", 100, 100), Stored("q.scale", "float32", 4, 16)], "int8 weights"),
        ([Stored("q.weight", "float32", 100, 400), Stored("position_ids", "int64", 512, 4096)], "none"),
        ([Stored("q.weight", "float32", 100, 400), Stored("mask", "uint8", 20, 20)], "none"),
    ],
)
def test_the_scheme_is_read_off_the_tensors(tensors, scheme):
    assert detect(tensors)["quantisation"] == scheme


def test_a_label_does_not_hide_what_was_loaded():
    # asked for one 4-bit format, held in another; asked for 4 bits, dequantised to bfloat16 (2 bytes per element)
    (line,) = mismatches("actor", {"quantisation": "nvfp4"}, detect(NF4))
    assert line.startswith("actor: quantisation nvfp4 was requested, bitsandbytes nf4 was loaded")
    (line,) = mismatches("rollout", {"quantisation": "int8 weights"}, detect([Stored("w", "bfloat16", 10, 20)]))
    assert line == "rollout: quantisation int8 weights was requested, none was loaded (2 bytes per element)"


def test_what_was_asked_for_and_loaded_is_no_mismatch():
    found = detect([Stored("w", "float32", 10, 40)])
    assert mismatches("actor", {"dtype": "float32", "quantisation": "none"}, found) == []
    assert mismatches("actor", {}, found) == []
    assert len(mismatches("actor", {"dtype": "bfloat16", "quantisation": "nf4"}, found)) == 2


def test_nothing_loaded_is_nothing_detected():
    assert detect([]) == {"dtype": None, "shares": {}, "quantisation": "none", "elements": 0, "bytes": 0, "bytes_per_element": None}
