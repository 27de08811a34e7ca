"""RLFlow's world model: it learns what substitutions do, and an agent trains inside it."""
