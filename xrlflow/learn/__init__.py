"""What agents of both kinds share: PPO, buffers, checkpoints."""
