// Train portable artifacts in JavaScript: npm install, then
//
//     node train.js ARTIFACTS DATA LEARNING_RATE RESULT
//
// The arguments are those of train.py. In a browser, fetch() takes the place of fs.
const fs = require("fs");
const path = require("path");

const ort = require(process.env.ORT ?? "onnxruntime-node"); // or ORT=onnxruntime-web

const TYPES = {
  F32: ["float32", Float32Array],
  F64: ["float64", Float64Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};

// safetensors: a length, a JSON text of that length, the bytes of the tensors
function read(file) {
  const raw = fs.readFileSync(file);
  const start = 8 + Number(raw.readBigUInt64LE(0));
  const { __metadata__: metadata, ...header } = JSON.parse(raw.toString("utf8", 8, start));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const [type, List] = TYPES[dtype];
    const bytes = new Uint8Array(raw.subarray(start + from, start + to)); // a copy, aligned for List
    tensors[name] = new ort.Tensor(type, new List(bytes.buffer), shape);
  }
  return { tensors, metadata };
}

function write(file, tensors, metadata) {
  const header = { __metadata__: metadata };
  const parts = [];
  let position = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const dtype = Object.keys(TYPES).find((key) => TYPES[key][0] === type);
    header[name] = { dtype, shape: dims, data_offsets: [position, (position += data.byteLength)] };
    parts.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  }
  let text = Buffer.from(JSON.stringify(header));
  text = Buffer.concat([text, Buffer.alloc((8 - (text.length % 8)) % 8, " ")]);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  fs.writeFileSync(file, Buffer.concat([length, text, ...parts]));
}

// number of a stack of batches
function batchOf({ type, dims, data }, number) {
  const size = dims.slice(1).reduce((a, b) => a * b, 1);
  return new ort.Tensor(type, data.slice(number * size, (number + 1) * size), dims.slice(1));
}

async function main(artifacts, dataFile, learningRate, result) {
  const manifest = JSON.parse(fs.readFileSync(path.join(artifacts, "manifest.json"), "utf8"));
  const step = manifest.graphs.train_step;
  const { tensors: state, metadata } = read(path.join(artifacts, manifest.checkpoint));
  const { tensors: data } = read(dataFile);
  const session = await ort.InferenceSession.create(fs.readFileSync(path.join(artifacts, step.file)));
  const rate = new ort.Tensor("float32", Float32Array.of(learningRate), []);
  for (let number = 0; number < Object.values(data)[0].dims[0]; number++) {
    const feed = { "optimizer/learning_rate": rate };
    for (const { name } of step.inputs) {
      if (name in data) feed[name] = batchOf(data[name], number);
      else if (name in state) feed[name] = state[name];
    }
    const results = await session.run(feed);
    for (const output of step.outputs) {
      if (output.feeds) state[output.feeds] = results[output.name];
      else if (output.role === "loss") console.log(results[output.name].data[0]);
    }
  }
  write(result, state, metadata);
}

const [artifacts, data, learningRate, result] = process.argv.slice(2);
main(artifacts, data, Number(learningRate), result);
