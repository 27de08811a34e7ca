"""Proofs of rewrite rules."""

from xrlflow.prover.proof import Certificate, prove, prove_all, prove_in_processes

__all__ = ["Certificate", "prove", "prove_all", "prove_in_processes"]
