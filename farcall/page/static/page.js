// The page: takes events in, and has the parts of the page show them.

import { ask } from "./asking.js";
import { addPoints, clearPoints, drawCharts, drawMemory } from "./charts.js";
import { byId, clock, el, keyed, setText } from "./dom.js";
import { showHistory } from "./history.js";
import { showLogs, leaveLogs } from "./logs.js";
import { showCollectives, showMemory, showReferences, showWeights, showSpmd } from "./parts.js";
import { addTasks, clearTasks, drawTasks } from "./tasks.js";
import { drawTopology } from "./topology.js";
import { drawWaits } from "./waits.js";
import { openWorker, refreshWorker } from "./worker.js";
import { showWorkers } from "./workers.js";

const TABS = ["overview", "tasks", "memory", "references", "collectives", "spmd", "logs", "history"];
const TITLES = { spmd: "SPMD" };
let view = null;
let tab = "overview";

// ---- tabs

function buildTabs() {
  const list = byId("tabs");
  for (const name of TABS) {
    const title = TITLES[name] ?? name[0].toUpperCase() + name.slice(1);
    list.append(el("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, type: "button", onclick: () => select(name) }, title));
  }
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? TABS.length - 1 : step ? (TABS.indexOf(tab) + step + TABS.length) % TABS.length : -1;
    if (to < 0) return;
    event.preventDefault();
    select(TABS[to]);
    byId(`tab-${TABS[to]}`).focus();
  });
  const asked = location.hash.slice(1);
  select(TABS.includes(asked) ? asked : "overview");
}

function select(name) {
  tab = name;
  for (const each of TABS) {
    const button = byId(`tab-${each}`);
    button.setAttribute("aria-selected", String(each === name));
    button.tabIndex = each === name ? 0 : -1;
    byId(`panel-${each}`).hidden = each !== name;
  }
  byId(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  history.replaceState(null, "", `#${name}`);
  leaveLogs();
  show();
}

// ---- what is shown

function show() {
  if (!view) return;
  showHead();
  if (tab === "overview") {
    drawWaits(view, openWorker);
    drawTopology(view, openWorker);
    drawCharts();
    showWorkers(view, openWorker);
  } else if (tab === "tasks") drawTasks(view);
  else if (tab === "memory") {
    drawMemory();
    showMemory(view, openWorker);
  } else if (tab === "references") {
    showReferences(view);
    showWeights(view);
  }
  else if (tab === "collectives") showCollectives(view);
  else if (tab === "spmd") showSpmd(view);
  else if (tab === "logs") showLogs(view);
  else if (tab === "history") showHistory(view);
}

function showHead() {
  const { job: found } = view;
  setText(byId("program"), found.program || "a program");
  const parts = [`job ${found.id}`, `${found.living} of ${found.count} workers live`];
  if (found.began) parts.push(`since ${clock(found.began)}`);
  setText(byId("jobline"), parts.join(" · "));
  document.title = `${found.program || found.id} · farcall`;
  const banner = byId("banner");
  const bad = found.dead || view.findings.some((each) => each.kind === "cycle");
  banner.dataset.state = bad ? "bad" : found.state;
  setText(byId("headline"), found.headline.replace(/(\d) (s|min|h)\b/g, "$1\u00a0$2"));
  const said = found.state === "moving" && !bad ? [] : view.findings.slice(0, 4);
  keyed(
    byId("findings"),
    [...said, ...view.skipped.map((each) => ({ label: "skipped", text: `${each.file}: ${each.why}` }))],
    (each) => `${each.label} ${each.text}`,
    (each) => el("li", {}, el("span", { class: `label ${each.label}` }, each.label), each.text),
  );
}

// ---- events

function take(event) {
  view = event.view;
  addPoints(event.points);
  connection(view.job.living ? "live" : "over", view.job.living ? "live" : "over");
  addTasks(event.tasks, view.at);
  show();
  refreshWorker(view);
}

function connection(text, tone) {
  const pill = byId("connection");
  setText(pill, text);
  pill.className = `pill ${tone}`;
}

async function listen() {
  let pause = 500;
  while (true) {
    try {
      const answer = await ask("events");
      clearPoints(); // a new stream begins with all that the server keeps
      clearTasks();
      pause = 500;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      while (true) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        const last = events.filter((each) => each.startsWith("data: "));
        for (const each of last) take(JSON.parse(each.slice(6)));
      }
    } catch (error) {
      if (error.status === 401 || error.status === 404) return refused(error);
      console.warn("the page's server does not answer:", error.message);
    }
    connection("disconnected", "lost");
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, 8000);
  }
}

function refused(error) {
  connection("refused", "lost");
  setText(byId("headline"), error.status === 404 ? "There is no such job any more" : "This page needs the address, with its token, that `farcall page` has printed");
}

buildTabs();
byId("window").addEventListener("change", show);
byId("filter").addEventListener("input", show);
window.addEventListener("resize", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
listen();
