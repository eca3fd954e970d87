// One worker, beside the page: its threads with their stacks, and its calls.

import { ask } from "./asking.js";
import { byId, bytes, el, look, rate, seconds, setText, stateWord } from "./dom.js";

let shown = "";
let seen = null;

export async function openWorker(name) {
  shown = name;
  setText(byId("worker-name"), name);
  byId("worker-body").replaceChildren(el("p", { class: "empty" }, "Reading"));
  const dialog = byId("worker");
  if (!dialog.open) dialog.showModal();
  await load();
}

export function refreshWorker(view) {
  seen = view;
  if (!byId("worker").open) return;
  const worker = view.workers.find((each) => each.name === shown);
  const facts = byId("worker-facts");
  if (worker && facts) facts.replaceWith(factsOf(worker));
}

function factsOf(worker) {
  const known = {
    State: stateWord(worker),
    Rank: worker.rank < 0 ? "–" : String(worker.rank),
    Host: worker.host,
    Process: String(worker.pid),
    CPU: `${Math.round(100 * worker.share)} %`,
    Memory: bytes(worker.memory),
    "Calls out": `${rate(worker.calls)}/s`,
    "Requests in": `${rate(worker.requests)}/s`,
    "Oldest wait": seconds(worker.oldest),
    Python: worker.python,
  };
  return el("dl", { class: "facts", id: "worker-facts" }, Object.entries(known).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

async function load() {
  const name = shown;
  try {
    const found = await (await ask("worker", { name })).json();
    if (name === shown) byId("worker-body").replaceChildren(...body(found));
    refreshWorker(seen);
  } catch (error) {
    byId("worker-body").replaceChildren(el("p", { class: "empty" }, `This worker cannot be shown: ${error.message}`));
  }
}

function* body(found) {
  yield el("dl", { class: "facts", id: "worker-facts" });
  yield el("button", { type: "button", onclick: load }, "Read the stacks again");
  if (found.frozen) yield el("p", { class: "muted" }, "Its interpreter does not run; these stacks were written without it.");
  const busy = found.threads.filter((each) => !each.idle);
  const idle = found.threads.filter((each) => each.idle);
  yield el("h3", {}, "Threads");
  if (!busy.length) yield el("p", { class: "empty" }, "No thread runs code of the program.");
  for (const each of busy) yield thread(each, true);
  if (idle.length) {
    yield el("h3", {}, idle.length === 1 ? "1 idle thread" : `${idle.length} idle threads`);
    for (const each of idle) yield thread(each, false);
  }
  for (const each of found.coroutines) yield thread({ name: `coroutine for ${each.from}`, doing: seconds(each.seconds), stack: each.stack }, true);
  if (found.calls.length) yield list("Calls that are not answered", found.calls, (each) => `${seconds(each.seconds)}  to ${each.to}: ${each.what}`);
  if (found.requests.length) yield list("Requests that it has not answered", found.requests, (each) => `${seconds(each.seconds)}  from ${each.from}, ${each.state}`);
}

function thread(found, open) {
  return el(
    "details",
    { class: "thread", open },
    el("summary", {}, el("b", {}, found.name), found.doing ? `  ${found.doing}` : ""),
    el("ol", {}, found.stack.map(([name, file, line]) => el("li", {}, el("b", {}, name), `  ${file}:${line}`))),
  );
}

function list(title, items, words) {
  return el("div", {}, el("h3", {}, title), el("ul", { class: "mono" }, items.slice(0, 100).map((each) => el("li", {}, words(each)))));
}

byId("worker-close").addEventListener("click", () => byId("worker").close());
byId("worker").addEventListener("click", (event) => {
  if (event.target === byId("worker")) byId("worker").close();
});
