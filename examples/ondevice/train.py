"""Train portable artifacts with nothing but onnxruntime and numpy.

    python train.py ARTIFACTS DATA LEARNING_RATE RESULT

ARTIFACTS: what generate_artifacts wrote. DATA: safetensors with the inputs, those of all steps stacked. RESULT: the
checkpoint after these steps, which lightning_ort reads.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

TYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32, "U8": np.uint8, "BOOL": np.bool_}


def read(path):
    """Tensors and metadata of a safetensors file: a length, a JSON text of that length, the bytes of the tensors."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    parts = {name: (e, raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]]) for name, e in header.items()}
    return {n: np.frombuffer(b, TYPES[e["dtype"]]).reshape(e["shape"]) for n, (e, b) in parts.items()}, metadata


def write(path, tensors, metadata):
    names, header, body = {np.dtype(t): name for name, t in TYPES.items()}, {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        end = len(body) + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [len(body), end]}
        body += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def main(artifacts, data, learning_rate, result):
    manifest = json.loads(Path(artifacts, "manifest.json").read_text())
    step = manifest["graphs"]["train_step"]
    state, metadata = read(Path(artifacts, manifest["checkpoint"]))
    batches, _ = read(Path(data))
    session = onnxruntime.InferenceSession(Path(artifacts, step["file"]), providers=["CPUExecutionProvider"])
    for number in range(len(next(iter(batches.values())))):
        feed = {i["name"]: state[i["name"]] for i in step["inputs"] if i["name"] in state}
        feed |= {name: values[number] for name, values in batches.items()}
        feed["optimizer/learning_rate"] = np.array(float(learning_rate), np.float32)
        for output, value in zip(step["outputs"], session.run([o["name"] for o in step["outputs"]], feed), strict=True):
            if "feeds" in output:
                state[output["feeds"]] = value
            elif output["role"] == "loss":
                print(float(value))
    write(Path(result), state, metadata)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 5 else __doc__)
