"""Kernel tuning on TVM: knob spaces, tuners, measuring, and what was learned."""
