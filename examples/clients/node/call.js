// Calls a served function with a tensor of float32, and prints the result as JSON:
//
//     npm install
//     node call.js localhost:8443 classify '[1, 64]' < pixels.f32
//
// The schemas are all that it needs to know of the server.
const path = require("node:path");
const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = process.env.FARCALL_PROTO || path.join(__dirname, "..", "..", "..", "proto");
const schema = loader.loadSync("farcall/v1/service.proto", {
  includeDirs: [PROTO, path.join(__dirname, "protos")],
  longs: Number,
  enums: String,
});
const { FarcallService } = grpc.loadPackageDefinition(schema).farcall.v1;

const READ = {
  DTYPE_FLOAT32: (data, at) => data.readFloatLE(4 * at),
  DTYPE_FLOAT64: (data, at) => data.readDoubleLE(8 * at),
  DTYPE_INT64: (data, at) => Number(data.readBigInt64LE(8 * at)),
  DTYPE_INT32: (data, at) => data.readInt32LE(4 * at),
};

// A value as the server sends it, as JavaScript has it; a tensor as its shape and numbers.
function plain(value) {
  if (value.tensor) {
    const { dtype, shape, data } = value.tensor;
    const count = shape.reduce((product, size) => product * size, 1);
    return { shape, numbers: Array.from({ length: count }, (_, at) => READ[dtype](data, at)) };
  }
  if (value.list) return value.list.items.map(plain);
  if (value.map) return Object.fromEntries(Object.entries(value.map.items).map(([key, each]) => [key, plain(each)]));
  return value.boolean ?? value.integer ?? value.number ?? value.text ?? value.binary ?? null;
}

const [address, name, shape] = process.argv.slice(2);
const client = new FarcallService(address, grpc.credentials.createInsecure());
const tensor = { dtype: "DTYPE_FLOAT32", shape: JSON.parse(shape), data: fs.readFileSync(0) };
client.Call({ call: { name, args: [{ tensor }] } }, (error, response) => {
  if (error) {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  } else {
    console.log(JSON.stringify(plain(response.value)));
  }
  client.close();
});
