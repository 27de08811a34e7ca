"""X-RLflow's agents, which choose substitutions: environment, features, encoder, training, search with a
trained agent."""
