"""Changes a model's precision on request: 8-bit integers, float16, or float32. Such a change alters the outputs.

`calibration` reads sets of inputs and measures errors; `integers` selects layers and quantises them; `floats` converts
between float16 and float32; `run` converts a model, optimises it, and compares the result with the original.
"""
