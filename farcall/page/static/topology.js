// Workers on a circle, and the calls in flight between them.

import { byId, el, keyed, look, seconds, setText, stateWord } from "./dom.js";

const SIZE = 560;
const MIDDLE = SIZE / 2;
let focused = 0;

export function drawTopology(view, open) {
  const place = byId("topology");
  const { workers } = view;
  const dense = workers.length > 32;
  const radius = dense ? 240 : workers.length > 12 ? 205 : workers.length > 6 ? 165 : 125;
  const body = dense ? Math.max(4, Math.min(8, 620 / workers.length)) : workers.length > 12 ? 13 : 20;
  let svg = place.firstChild;
  if (!svg) {
    svg = el("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "group", "aria-label": "Workers; arrow keys move, Enter shows one" });
    svg.append(el("g", { class: "arcs" }), el("g", { class: "edges" }), el("g", { class: "heads" }), el("g", { class: "nodes" }));
    svg.addEventListener("keydown", (event) => move(event, svg));
    place.append(svg);
  }
  const height = workers.length <= 1 ? 120 : workers.length === 2 ? 200 : Math.min(SIZE, 2 * (radius + body) + 70);
  const width = Math.min(SIZE, 2 * (radius + body) + 210);
  svg.setAttribute("viewBox", `${MIDDLE - width / 2} ${MIDDLE - height / 2} ${width} ${height}`);
  svg.style.setProperty("--label", `${12 * Math.max(1, width / (place.clientWidth || width))}px`);
  svg.style.maxHeight = `${Math.min(480, height * 1.25)}px`;
  const [arcs, edges, heads, nodes] = svg.children;
  const at = workers.map((_, n) => position(n, workers.length, workers.length === 1 ? 0 : radius));
  const cycle = inCycle(view);
  const shown = [
    ...view.edges.map((each) => ({ ...each, kind: cycle(each) ? "cycle" : each.oldest >= 2 ? "long" : "" })),
    ...view.links.map((each) => ({ ...each, kind: "link", count: 1, oldest: 0, what: [each.state.toLowerCase()] })),
  ];
  const id = (each) => `${each.kind === "link" ? "link" : "call"} ${each.from} ${each.to}`;
  keyed(edges, shown, id, () => el("path", {}, el("title")), (path, each) => {
    path.setAttribute("d", curve(at[each.from], at[each.to], body).d);
    path.setAttribute("class", `edge ${each.kind}`);
    path.style.strokeWidth = String(Math.min(1.4 + Math.log2(each.count), 6));
    setText(path.firstChild, `${workers[each.from].name} → ${workers[each.to].name}: ${each.count} × ${each.what.join(", ")}, ${seconds(each.oldest)}`);
  });
  keyed(heads, dense ? [] : shown.filter((each) => each.kind !== "link"), id, () => el("polygon", { points: "0,0 -9,4.5 -9,-4.5" }), (head, each) => {
    const { x, y, angle } = curve(at[each.from], at[each.to], body);
    head.setAttribute("transform", `translate(${x} ${y}) rotate(${angle})`);
    head.setAttribute("class", `head ${each.kind}`);
  });
  keyed(nodes, workers, (each) => each.name, (each) => node(each, open, svg), (group, each) => {
    const n = workers.indexOf(each);
    const [tone, sign] = look(each);
    group.dataset.tone = tone;
    group.dataset.index = n;
    group.setAttribute("transform", `translate(${at[n].x} ${at[n].y})`);
    group.setAttribute("aria-label", `${each.name}: ${stateWord(each)}${each.oldest >= 2 ? `, oldest wait ${seconds(each.oldest)}` : ""}`);
    group.setAttribute("tabindex", n === Math.min(focused, workers.length - 1) ? 0 : -1);
    const [ring, circle, mark, name] = group.children;
    ring.setAttribute("r", body + 4);
    circle.setAttribute("r", body);
    setText(mark, dense ? "" : sign || (each.rank >= 0 ? String(each.rank) : ""));
    setText(name, dense ? "" : each.name.length > 18 ? `${each.name.slice(0, 17)}…` : each.name);
    label(name, at[n], body, workers.length);
  });
  drawHosts(arcs, workers, at, radius, dense);
  note(view);
}

function position(n, count, radius) {
  const angle = count === 2 ? Math.PI * (1 + n) : (2 * Math.PI * n) / count - Math.PI / 2;
  return { x: MIDDLE + radius * Math.cos(angle), y: MIDDLE + radius * Math.sin(angle) * (count === 2 ? 0 : 1), angle };
}

function label(text, at, body, count) {
  const sideways = count > 2 && Math.abs(Math.cos(at.angle)) > 0.45;
  const away = body + 8;
  text.setAttribute("x", sideways ? Math.sign(Math.cos(at.angle)) * away : 0);
  text.setAttribute("y", sideways ? 0 : (Math.sin(at.angle) < -0.3 && count > 2 ? -1 : 1) * (away + 6));
  text.style.textAnchor = sideways ? (Math.cos(at.angle) > 0 ? "start" : "end") : "middle";
}

// A curve that bends to the left of its direction, so that there and back are two lines.
function curve(from, to, body) {
  if (from === to) {
    const x = from.x + body * 0.7, y = from.y - body * 0.7;
    return { d: `M${from.x} ${from.y - body} c 4 -26 34 -22 ${body} ${body * 0.6}`, x, y, angle: 120 };
  }
  const dx = to.x - from.x, dy = to.y - from.y;
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(46, length * 0.16);
  const cx = (from.x + to.x) / 2 + (dy / length) * bend, cy = (from.y + to.y) / 2 - (dx / length) * bend;
  const angle = Math.atan2(to.y - cy, to.x - cx);
  const away = Math.atan2(cy - from.y, cx - from.x);
  const x = to.x - Math.cos(angle) * (body + 3), y = to.y - Math.sin(angle) * (body + 3);
  const x0 = from.x + Math.cos(away) * (body + 2), y0 = from.y + Math.sin(away) * (body + 2);
  return { d: `M${x0} ${y0} Q${cx} ${cy} ${x - Math.cos(angle) * 5} ${y - Math.sin(angle) * 5}`, x, y, angle: (angle * 180) / Math.PI };
}

function node(worker, open, svg) {
  const show = () => open(worker.name);
  const group = el(
    "g",
    {
      class: "node",
      role: "button",
      onclick: show,
      onfocus: (event) => { focused = Number(event.currentTarget.dataset.index); say(event.currentTarget); },
      onmouseenter: (event) => say(event.currentTarget),
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(); }
      },
    },
    el("circle", { class: "ring" }), el("circle", { class: "body" }), el("text", { class: "sign" }), el("text", { class: "name" }),
  );
  return group;
}

function move(event, svg) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const nodes = [...svg.querySelectorAll(".node")];
  const next = nodes[(focused + step + nodes.length) % nodes.length];
  nodes.forEach((each) => each.setAttribute("tabindex", each === next ? 0 : -1));
  next.focus();
}

const say = (group) => setText(byId("topology-note"), group.getAttribute("aria-label"));

function note(view) {
  const active = document.activeElement?.closest?.(".node");
  if (active) return say(active);
  const flights = view.edges.reduce((sum, each) => sum + each.count, 0);
  const broken = view.links.length ? ` · ${view.links.length} connections are being made again` : "";
  const more = view.edges_left_out ? ` · ${view.edges_left_out} pairs with fewer calls are not drawn` : "";
  if (!byId("topology").matches(":hover")) setText(byId("topology-note"), `${flights === 1 ? "1 call" : `${flights} calls`} in flight${broken}${more}`);
}

function inCycle(view) {
  const cycles = new Set();
  for (const arrow of view.waits.arrows) {
    if (!arrow.cycle) continue;
    for (const from of view.waits.boxes[arrow.from].workers) for (const to of view.waits.boxes[arrow.to].workers) cycles.add(`${from}\n${to}`);
  }
  return (edge) => cycles.has(`${view.workers[edge.from].name}\n${view.workers[edge.to].name}`);
}

function drawHosts(arcs, workers, at, radius, dense) {
  const hosts = [...new Set(workers.map((each) => each.host))];
  const spans = [];
  if (hosts.length > 1 && workers.length > 3) {
    for (const host of hosts) {
      const mine = workers.map((each, n) => (each.host === host ? n : -1)).filter((n) => n >= 0);
      if (mine.at(-1) - mine[0] === mine.length - 1) spans.push({ host, first: mine[0], last: mine.at(-1) });
    }
  }
  keyed(arcs, spans, (each) => each.host, () => el("g", {}, el("path", { class: "hostarc" }), el("text", { class: "hostname" })), (group, each) => {
    const out = radius + (dense ? 16 : 34);
    const point = (angle, r = out) => `${MIDDLE + r * Math.cos(angle)} ${MIDDLE + r * Math.sin(angle)}`;
    const step = (2 * Math.PI) / workers.length;
    const [a, b] = [at[each.first].angle - step * 0.35, at[each.last].angle + step * 0.35];
    group.children[0].setAttribute("d", `M${point(a)} A${out} ${out} 0 ${b - a > Math.PI ? 1 : 0} 1 ${point(b)}`);
    const [x, y] = point((a + b) / 2, out - 26).split(" ");
    group.children[1].setAttribute("x", x);
    group.children[1].setAttribute("y", y);
    setText(group.children[1], dense ? each.host : "");
  });
}
