"""Proofs of rewrite rules."""

from xrlflow.verify.rules.proof import Certificate, prove, prove_all, prove_in_processes

__all__ = ["Certificate", "prove", "prove_all", "prove_in_processes"]
