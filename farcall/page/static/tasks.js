// The task stream: calls and operations of groups, by worker, over time.

import { cssColour } from "./charts.js";
import { byId, el, keyed, seconds, setText, table } from "./dom.js";

const tasks = new Map();
const MAX_TASKS = 4000;
const COLOURS = 8;
const colours = new Map();
const GROUP = "operations of groups";
let paused = 0;
let at = 0;
let layout = [];
let view = null;

export function clearTasks() {
  tasks.clear();
}

export function addTasks(more, now) {
  at = now;
  for (const [number, kind, lane, by, what, began, ended, how] of more) tasks.set(number, { number, kind, lane, by, what, began, ended, how });
  for (const number of tasks.keys()) {
    if (tasks.size <= MAX_TASKS) break;
    tasks.delete(number);
  }
}

const colourOf = (task) => {
  const name = task.kind === "group" ? GROUP : task.what;
  if (!colours.has(name)) colours.set(name, name === GROUP ? "--muted" : `--c${[...colours.keys()].filter((each) => each !== GROUP).length % COLOURS}`);
  return colours.get(name);
};

export function drawTasks(found) {
  view = found;
  const all = [...tasks.values()];
  const newest = view.job.living ? at : Math.max(...all.map((each) => each.ended ?? each.began), 0) || at;
  const end = paused || newest;
  // Not earlier than the job itself; a tenth of what is asked for at least.
  const span = Number(byId("window").value);
  const begin = Math.max(end - span, Math.min(view.job.began || 0, end - span / 10));
  const inside = all.filter((each) => each.began < end && (each.ended ?? newest) > begin);
  inside.sort((a, b) => a.began - b.began);
  inside.forEach(colourOf);
  draw(inside, begin, end);
  byId("stream-empty").hidden = inside.length > 0;
  const used = new Map();
  for (const each of inside) {
    const name = each.kind === "group" ? GROUP : each.what;
    used.set(name, (used.get(name) ?? 0) + 1);
  }
  const legend = [...used].sort((a, b) => b[1] - a[1]).slice(0, 12);
  keyed(byId("legend"), legend, (each) => each[0], ([name]) => {
    const swatch = el("i");
    swatch.style.background = `var(${colours.get(name)})`;
    return el("span", {}, swatch, el("span", {}));
  }, (node, [name, count]) => setText(node.lastChild, `${name} (${count})`));
  const running = all.filter((each) => each.ended === null).sort((a, b) => a.began - b.began);
  table(byId("flights"), FLIGHTS, running.slice(0, 100), (each) => each.number, "Nothing is in flight.");
}

const FLIGHTS = [
  { title: "What", class: "wrap mono", show: (each) => each.what },
  { title: "At", show: (each) => each.lane },
  { title: "Asked by", show: (each) => each.by || "–" },
  { title: "State", show: (each) => each.how },
  { title: "For", class: "num", show: (each) => seconds(at - each.began) },
];

function draw(inside, begin, end) {
  const canvas = byId("canvas");
  const width = canvas.parentNode.clientWidth;
  if (!width) return;
  const lanes = lay(inside, end);
  const names = width < 600 ? 72 : 130;
  const dense = view.workers.length > 32;
  const row = dense ? 9 : 17;
  let height = 26;
  for (const lane of lanes) {
    lane.top = height;
    height += lane.rows * row + (dense ? 3 : 7);
  }
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `${dense ? 9 : 12}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  const x = (time) => names + ((time - begin) / (end - begin)) * (width - names - 6);
  const ink = cssColour("--ink"), muted = cssColour("--muted"), line = cssColour("--line");
  axis(pen, begin, end, x, height, muted, line);
  layout = [];
  for (const lane of lanes) {
    pen.fillStyle = ink;
    pen.fillText(fit(pen, lane.name, names - 10), 0, lane.top + (lane.rows * row) / 2);
    pen.fillStyle = line;
    pen.fillRect(0, lane.top + lane.rows * row + (dense ? 1 : 3), width, 1);
    for (const { task, level } of lane.tasks) {
      const left = Math.max(names, x(task.began)), right = Math.max(left + 2, x(Math.min(task.ended ?? end, end)));
      const top = lane.top + level * row;
      pen.globalAlpha = task.how === "queued" || task.how === "arriving" ? 0.45 : 1;
      pen.fillStyle = task.how === "lost" ? cssColour("--bad") : cssColour(colourOf(task));
      pen.beginPath();
      pen.roundRect(left, top, right - left, row - 2, 3);
      pen.fill();
      pen.globalAlpha = 1;
      if (!dense && right - left > 40) {
        pen.fillStyle = cssColour("--surface");
        pen.fillText(fit(pen, task.what, right - left - 10), left + 5, top + row / 2 - 1);
      }
      layout.push({ left, right, top, bottom: top + row, task });
    }
  }
  canvas.setAttribute("aria-label", `${inside.length} tasks at ${lanes.length === 1 ? "1 worker" : `${lanes.length} workers`} in the last ${Math.round(end - begin)} s`);
}

// Each task in the first row of its lane that is free.
function lay(inside, end) {
  const lanes = new Map(view.workers.map((each) => [each.name, { name: each.name, rows: 1, tasks: [], free: [] }]));
  for (const task of inside) {
    const lane = lanes.get(task.lane);
    if (!lane) continue;
    let level = lane.free.findIndex((until) => until <= task.began);
    if (level < 0) level = lane.free.length < 8 ? lane.free.length : 7;
    lane.free[level] = task.ended ?? end;
    lane.rows = Math.max(lane.rows, level + 1);
    lane.tasks.push({ task, level });
  }
  return [...lanes.values()];
}

function axis(pen, begin, end, x, height, muted, line) {
  const span = end - begin;
  const step = [5, 10, 30, 60, 120, 300, 600, 1200].find((each) => span / each <= pen.canvas.clientWidth / 90) ?? 3600;
  pen.fillStyle = muted;
  let free = 0;
  for (let time = Math.ceil(begin / step) * step; time <= end; time += step) {
    const text = new Date(time * 1000).toLocaleTimeString("en-GB");
    const left = Math.min(x(time) + 4, x(end) - pen.measureText(text).width);
    if (left >= free) pen.fillText(text, left, 9);
    free = left + pen.measureText(text).width + 8;
    pen.fillStyle = line;
    pen.fillRect(x(time), 0, 1, height);
    pen.fillStyle = muted;
  }
}

function fit(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return length > 1 ? `${text.slice(0, length)}…` : "";
}

byId("canvas").addEventListener("mousemove", (event) => {
  const hit = layout.findLast((each) => event.offsetX >= each.left - 1 && event.offsetX <= each.right + 1 && event.offsetY >= each.top && event.offsetY <= each.bottom);
  byId("canvas").title = hit ? `${hit.task.what}, ${seconds((hit.task.ended ?? at) - hit.task.began)}, ${hit.task.how}, at ${hit.task.lane}${hit.task.by ? `, asked by ${hit.task.by}` : ""}` : "";
});
byId("pause").addEventListener("click", () => {
  paused = paused ? 0 : at;
  byId("pause").setAttribute("aria-pressed", String(!!paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (view) drawTasks(view);
});
