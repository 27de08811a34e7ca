"""The One-Shot Tuner (Ryu et al., CC 2022): a model that predicts times is trained once for a kind of machine. Kernels
are then chosen by predicted times, and none is measured."""
