// This user's jobs: how they go, or have ended.

import { ask } from "./asking.js";
import { byId, clock, el, seconds, table } from "./dom.js";

let asked = 0;

export async function showHistory() {
  if (Date.now() - asked < 5000) return;
  asked = Date.now();
  const { jobs } = await (await ask("jobs")).json();
  table(byId("history"), COLUMNS, jobs, (each) => each.id, "No job has run yet.");
}

const COLUMNS = [
  { title: "Job", class: "mono", show: (each) => el("a", { class: "link", href: `/?job=${encodeURIComponent(each.id)}` }, each.id) },
  { title: "Program", class: "cut", show: (each) => each.program || "–" },
  { title: "Began", show: (each) => clock(each.began) },
  { title: "Lasted", class: "num", show: (each) => (each.began ? seconds(Math.max(0, each.seen - each.began)) : "–") },
  { title: "Workers", class: "num", show: (each) => String(each.workers) },
  { title: "State", show: (each) => el("span", { class: "state", "data-tone": { running: "ok", dead: "bad", failed: "bad" }[each.state] ?? "off" }, each.state || "unknown") },
  { title: "What was found", class: "wrap", show: (each) => each.why.split("\n")[0] || "–" },
];
