"""Tuners, which propose the candidates that are measured next."""
