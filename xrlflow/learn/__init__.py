"""What agents of all kinds share: PPO, distributions over factored actions, logs and learning curves. It knows no
graphs."""
