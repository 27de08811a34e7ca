"""RLFlow's world model: it learns to predict what substitutions change, and an agent trains on its predictions."""
