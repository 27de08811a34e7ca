"""Operators: what they are (schema), what they give (infer), compute (evaluate) and take (work)."""
