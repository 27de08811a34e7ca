"""Kernel tuning: tasks, spaces of knobs, tuners, processes that build and run kernels, and a store of what was
tuned."""
