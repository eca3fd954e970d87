// Loads a trace into Perfetto's trace processor, and answers SQL queries.
//
//   node trace_processor.mjs FOLDER TRACE < queries
//
// `queries` is a JSON list of texts; the rows of each are written as JSON. The folder has Perfetto's engine as it is
// built for a web worker: trace_processor.wasm, its loader, and the decoder of its answers.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace] = process.argv.slice(2);
const PIECE_BYTES = 16 * 2 ** 20;

// A web worker's scope, as far as the loader uses it. The port of the first message is where requests come from.
class LocalFile {
  open(_method, name) {
    this.name = name;
  }
  send() {
    this.response = readFileSync(join(folder, this.name));
    this.status = 200;
  }
}
const scope = { self: globalThis, location: { href: "file:///" }, WorkerGlobalScope: Object, importScripts() {}, XMLHttpRequest: LocalFile };
for (const [name, value] of Object.entries(scope)) Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
console.log = console.warn = () => {};

const loader = readFileSync(join(folder, "engine_bundle.node.js"), "utf8");
vm.runInThisContext(loader.replace("useMemory64 = hasMemory64Support()", "useMemory64 = false"), { filename: "engine_bundle.js" });
await new Promise(setImmediate); // the engine sets itself up in microtasks

const { EngineBase } = await import(pathToFileURL(join(folder, "engine.mjs")));
const { port1, port2 } = new MessageChannel();
globalThis.onmessage({ data: port1 });
class Engine extends EngineBase {
  rpcSendRequestBytes(bytes) {
    port2.postMessage(bytes);
  }
}
const engine = new Engine();
port2.onmessage = ({ data }) => engine.onRpcResponseBytes(data);

const bytes = readFileSync(trace);
for (let at = 0; at < bytes.length; at += PIECE_BYTES) await engine.parse(new Uint8Array(bytes.subarray(at, at + PIECE_BYTES)));
await engine.notifyEof();

const answers = [];
for (const query of JSON.parse(readFileSync(0, "utf8"))) {
  const found = await engine.query(query);
  const columns = found.columns();
  const rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => row.get(name)));
  answers.push(rows);
}
process.stdout.write(JSON.stringify(answers, (_, value) => (typeof value === "bigint" ? Number(value) : value)), () => process.exit(0));
