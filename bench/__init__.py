"""Benchmarks: one file for each published table, which it prints, and writes with `--write`."""
