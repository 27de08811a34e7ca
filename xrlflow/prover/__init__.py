"""Proofs of rewrite rules: cases that are drawn, evaluated over prime fields, in float64 and in ONNX Runtime; and wrong
rules, which they have to reject."""

from xrlflow.prover.proof import Certificate, prove, prove_all, prove_by

__all__ = ["Certificate", "prove", "prove_all", "prove_by"]
