"""Proofs of rewrite rules. Cases of a rule are drawn and evaluated over prime fields, in float64 and in ONNX Runtime.
The same tests have to reject wrong rules (mutants).
"""

from xrlflow.prover.proof import Certificate, prove, prove_all, prove_by

__all__ = ["Certificate", "prove", "prove_all", "prove_by"]
