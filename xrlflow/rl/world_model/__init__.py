"""RLFlow's world model: it learns what substitutions change, and an agent trains inside it."""
