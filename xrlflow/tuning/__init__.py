"""Kernel tuning: compilation with measured, predicted or estimated times of kernels (`lowering`), the tuning of models
(`models`), tuning tasks, design spaces, tuners, processes that build and run kernels, and a store of measurements."""
