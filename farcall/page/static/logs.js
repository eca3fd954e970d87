// The end of the output of one worker, or of all by time, where `farcall launch --log-dir` keeps it.

import { ask } from "./asking.js";
import { byId, el, keyed, setText } from "./dom.js";

const ALL = { name: "", title: "all, by time" };

let timer = 0;
let lines = [];
let trouble = "";

export function showLogs(view) {
  const select = byId("log-worker");
  keyed(select, [ALL, ...view.workers], (each) => `worker ${each.name}`, (each) => el("option", { value: each.name }, each.title ?? each.name));
  if (!timer) {
    timer = setInterval(load, 2000);
    load();
  }
}

export function leaveLogs() {
  clearInterval(timer);
  timer = 0;
}

async function load() {
  try {
    ({ lines, trouble } = await (await ask("logs", { name: byId("log-worker").value })).json());
    draw();
  } catch (error) {
    setText(byId("log"), `The output cannot be shown: ${error.message}`);
  }
}

function draw() {
  const log = byId("log");
  const wanted = byId("log-search").value.toLowerCase();
  const found = wanted ? lines.filter((each) => each.toLowerCase().includes(wanted)) : lines;
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  const nothing = lines.length ? `None of the last ${lines.length} lines contains this text.` : "Nothing was printed yet.";
  setText(log, trouble || found.join("\n") || nothing);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

byId("log-worker").addEventListener("change", load);
byId("log-search").addEventListener("input", draw);
