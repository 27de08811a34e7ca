"""Proofs of rewrite rules."""

from xrlflow.prover.proof import Certificate, prove, prove_all, prove_by

__all__ = ["Certificate", "prove", "prove_all", "prove_by"]
