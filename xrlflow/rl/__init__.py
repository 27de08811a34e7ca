"""X-RLflow's agents, which choose substitutions: environment, features, encoder, training, and search with a trained
agent."""
