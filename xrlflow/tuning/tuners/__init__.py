"""Tuners: what is measured next."""
