"""Parts that both kinds of agents share: PPO, distributions, logs, checkpoints."""
