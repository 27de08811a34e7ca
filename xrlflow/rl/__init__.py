"""Agents that choose substitutions: environment, features, encoder, training, search with a trained agent."""
