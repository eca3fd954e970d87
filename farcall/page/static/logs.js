// The end of a worker's output, where `farcall launch --log-dir` keeps it.

import { byId, el, keyed, setText } from "./dom.js";
import { ask } from "./page.js";

let timer = 0;

export function showLogs(view) {
  const select = byId("log-worker");
  keyed(select, view.workers, (each) => each.name, (each) => el("option", { value: each.name }, each.name));
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
  const log = byId("log");
  try {
    const { lines, trouble } = await (await ask("logs", { name: byId("log-worker").value })).json();
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    setText(log, trouble || lines.join("\n") || "Nothing was printed yet.");
    if (atEnd) log.scrollTop = log.scrollHeight;
  } catch (error) {
    setText(log, `The output cannot be shown: ${error.message}`);
  }
}

byId("log-worker").addEventListener("change", load);
