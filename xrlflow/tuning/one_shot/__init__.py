"""The One-Shot Tuner (Ryu et al., CC 2022): a model of times is trained once for a kind of machine, and then chooses
kernels without measuring any."""
