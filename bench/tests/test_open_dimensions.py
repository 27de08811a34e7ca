"""bench/open_dimensions.py: which sizes it measures, and what its table says."""

from __future__ import annotations

from bench import open_dimensions as bench


def test_the_sizes_are_those_of_the_first_dimension_that_is_no_batch() -> None:
    assert list(bench.sizes_of("t5-encoder"))[:2] == [{"batch": 1, "length": 16}, {"batch": 1, "length": 64}]
    assert list(bench.sizes_of("swin")) == [{"batch": 1}, {"batch": 2}, {"batch": 5}]
    assert next(iter(bench.sizes_of("segformer"))) == {"batch": 1, "height": 224, "width": 224}
    assert [sizes["length"] for sizes in bench.sizes_of("clip-text")] == [16, 64]


def test_an_original_counts_as_one() -> None:
    entry = {"at": {"length": 16}, "original_ms": 2.0, "control": [1.0, 0.9, 1.1], "ours": [2.0, 1.9, 2.1]}
    rows = [
        {
            "name": name,
            "threads": 2,
            "sizes": [entry],
            "onnxslim": "Error: no",
            "report": {"returned_original": original},
        }
        for name, original in (("a", False), ("b", True))
    ]
    text = bench.table(rows)
    assert "| a | 2 | length 16 | 2.00 | 1.000 [0.900, 1.100] | fails | - | 2.000 [1.900, 2.100] |" in text
    assert "| b | 2 | length 16 | 2.00 | 1.000 [0.900, 1.100] | fails | - | 1 (original) |" in text
    assert "Geometric mean of 2 rows: 1.414, least 1.000." in text
