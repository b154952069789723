"""A project that trains in ONNX Runtime: data, model, and nothing about how or where they are trained."""
