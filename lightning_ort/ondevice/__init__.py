"""On-device training: artifacts, and the classes that train them, on any ONNX Runtime."""
