// The table of workers.

import { byId, bytes, el, fill, keyed, look, meter, rate, seconds, stateWord } from "./dom.js";

let order = { column: "rank", down: false };

const COLUMNS = [
  { name: "name", title: "Worker", text: true, show: (each, open) => el("button", { class: "link", type: "button", onclick: () => open(each.name) }, each.name) },
  { name: "rank", title: "Rank", class: "num wideonly", show: (each) => (each.rank < 0 ? "–" : String(each.rank)) },
  { name: "host", title: "Host", class: "wideonly cut", text: true, show: (each) => each.host },
  { name: "pid", title: "Process", class: "num wideonly", show: (each) => String(each.pid) },
  { name: "state", title: "State", text: true, show: (each) => el("span", { class: "state", "data-tone": look(each)[0] }, `${look(each)[1]} ${stateWord(each)}`.trim()) },
  { name: "share", title: "CPU", class: "num", show: (each) => meter(`${Math.round(100 * each.share)} %`, each.share / scale.share) },
  { name: "memory", title: "Memory", class: "num", show: (each) => meter(bytes(each.memory), each.memory / scale.memory) },
  { name: "calls", title: "Out/s", class: "num wideonly", show: (each) => rate(each.calls) },
  { name: "requests", title: "In/s", class: "num wideonly", show: (each) => rate(each.requests) },
  { name: "busy", title: "Threads", class: "num wideonly", show: (each) => (each.threads ? `${each.busy} of ${each.threads}${each.queued ? ` +${each.queued}` : ""}` : "–") },
  { name: "oldest", title: "Waits", class: "num", show: (each) => seconds(each.oldest) },
  { name: "doing", title: "Main thread", class: "wideonly cut mono rest", text: true, show: (each) => each.doing },
];

let scale = { share: 1, memory: 1 };

export function showWorkers(view, open) {
  const place = byId("workers");
  if (!place._body) build(place, view, open);
  const wanted = byId("filter").value.trim().toLowerCase();
  const rows = view.workers.filter((each) => !wanted || `${each.name} ${each.host} ${stateWord(each)}`.toLowerCase().includes(wanted));
  const { column, down } = order;
  const of = column === "state" ? (each) => -["bad", "odd", "warn", "off", "ok"].indexOf(look(each)[0]) : (each) => each[column];
  rows.sort((a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : a.rank - b.rank) * (down ? -1 : 1));
  scale = { share: Math.max(1, ...view.workers.map((each) => each.share)), memory: Math.max(1, ...view.workers.map((each) => each.memory)) };
  keyed(
    place._body,
    rows,
    (each) => each.name,
    () => el("tr", {}, COLUMNS.map((each) => el("td", { class: each.class ?? "" }))),
    (row, each) => {
      row.dataset.worker = each.name;
      COLUMNS.forEach((one, n) => {
        if (one.name !== "name" || !row.children[n].firstChild) fill(row.children[n], one.show(each, open));
        if (one.class?.includes("cut")) row.children[n].title = one.show(each);
      });
    },
  );
  for (const head of place.querySelectorAll("th")) {
    if (head.dataset.column === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

function build(place, view, open) {
  const head = el("tr");
  for (const column of COLUMNS) {
    const sort = () => {
      order = { column: column.name, down: order.column === column.name ? !order.down : !column.text };
      place._again();
    };
    head.append(el("th", { scope: "col", class: column.class?.replace(/ (cut|rest)/g, "") ?? "", "data-column": column.name }, el("button", { type: "button", onclick: sort }, column.title)));
  }
  place._body = el("tbody");
  place.append(el("table", {}, el("thead", {}, head), place._body));
  place._again = () => byId("filter").dispatchEvent(new Event("input"));
}
