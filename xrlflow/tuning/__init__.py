"""Kernel tuning: graphs compiled with what is known of kernels (`lowering`), whole models (`models`), tasks, spaces of
knobs, tuners, processes that build and run kernels, and a store of what was tuned."""
