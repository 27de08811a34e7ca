"""The predictor of the One-Shot Tuner. `CARD.md` in this folder says how it was trained and evaluated."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("one_shot.safetensors")
