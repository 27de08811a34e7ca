"""The One-Shot Tuner (Ryu et al., CC 2022): a model of times that is trained once for a kind of machine chooses kernels
without a measurement."""
