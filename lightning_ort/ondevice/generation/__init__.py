"""From a module or an ONNX model to the graphs of its steps."""
