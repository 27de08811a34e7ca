"""ONNX's operators: their definitions (schema), types (infer), values (evaluate) and costs (work)."""
