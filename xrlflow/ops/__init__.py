"""ONNX's operators: their definitions (schema), the inference of types (infer), their evaluation (evaluate), and how
much they compute and move (work).
"""
