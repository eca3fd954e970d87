// Jobs of the past: how they ended, and their figures over time.

import { ask } from "./asking.js";
import { draw } from "./charts.js";
import { byId, clock, el, rate, seconds, setText, table } from "./dom.js";

let asked = 0;
let opened = "";

export async function showHistory() {
  if (Date.now() - asked < 5000) return;
  asked = Date.now();
  const { jobs, trouble } = await (await ask("jobs")).json();
  const note = byId("history-trouble");
  note.hidden = !trouble;
  setText(note, trouble ? `The history cannot be kept: ${trouble}` : "");
  table(byId("history"), COLUMNS, jobs, (each) => each.id, "No job has run yet.");
}

const COLUMNS = [
  { title: "Job", class: "mono", show: (each) => (each.files ? el("a", { class: "link", href: `/?job=${encodeURIComponent(each.id)}` }, each.id) : each.id) },
  { title: "Program", class: "cut", show: (each) => each.program || "–" },
  { title: "Began", show: (each) => clock(each.began) },
  { title: "Lasted", class: "num", show: (each) => (each.began ? seconds(Math.max(0, each.seen - each.began)) : "–") },
  { title: "Workers", class: "num", show: (each) => String(each.workers) },
  { title: "State", show: (each) => el("span", { class: "state", "data-tone": { running: "ok", dead: "bad", failed: "bad" }[each.state] ?? "off" }, each.state || "unknown") },
  { title: "What was found", class: "wrap", show: (each) => each.why.split("\n")[0] || "–" },
  { title: "Figures", show: (each) => el("button", { class: "link", type: "button", onclick: (event) => figures(each, event.currentTarget) }, "Show") },
];

async function figures(job, button) {
  document.querySelector(".figures")?.remove();
  if (opened === job.id) return void (opened = "");
  opened = job.id;
  const { points } = await (await ask("points", { job: job.id })).json();
  const place = el("div", { class: "chart" });
  const title = points.length ? `${job.id}: calls per second` : `${job.id}: no figures were kept, as no page was open while it ran`;
  const card = el("article", { class: "card wide figures" }, el("h2", {}, title), place);
  byId("history").parentNode.after(card);
  if (points.length) draw(place, { series: [["made", 1, "--c0"], ["received", 2, "--c2"]], show: rate }, [0, 1, 2].map((n) => points.map((each) => each[n])));
  else place.remove();
  card.scrollIntoView({ block: "nearest" });
}
