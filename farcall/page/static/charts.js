// Figures of the whole job over the last minutes, drawn by uPlot.

import { byId, bytes, el, keyed, rate, setText } from "./dom.js";

const points = [];
const MAX_POINTS = 600;
const charts = new Map();

const MEMORY = { series: [["memory", 4, "--c4"]], show: bytes, steps: Array.from({ length: 44 }, (_, n) => 2 ** n) };
const CHARTS = [
  { id: "chart-calls", series: [["made", 1, "--c0"], ["received", 2, "--c2"]], show: rate },
  { id: "chart-cores", series: [["cores", 3, "--c1"]], show: (value) => (value == null ? "" : value.toFixed(value < 10 ? 1 : 0)) },
  { id: "chart-memory", ...MEMORY },
];

export function clearPoints() {
  points.length = 0;
}

export function addPoints(more) {
  points.push(...more);
  points.splice(0, Math.max(0, points.length - MAX_POINTS));
}

export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function drawCharts() {
  byId("charts-empty").hidden = points.length > 0;
  CHARTS.forEach(drawFigure);
}

export const drawMemory = () => drawFigure({ id: "chart-memory-tall", ...MEMORY });


function drawFigure(chart) {
  const place = byId(chart.id);
  place.closest("figure").hidden = !points.length;
  if (!points.length) return;
  const data = [points.map((each) => each[0]), ...chart.series.map(([, index]) => points.map((each) => each[index]))];
  draw(place, chart, data);
  const caption = place.parentNode.querySelector("figcaption");
  const many = chart.series.length > 1;
  if (!caption.lastElementChild) caption.append(el("span"));
  const last = points.at(-1);
  keyed(caption.lastElementChild, chart.series, ([name]) => name, ([, , colour]) => {
    const swatch = el("i", { hidden: !many });
    swatch.style.background = `var(${colour})`;
    return el("span", {}, swatch, el("b"));
  }, (node, [name, index]) => setText(node.lastChild, last ? `${chart.show(last[index])}${many ? ` ${name}` : ""}` : ""));
}

// No line is drawn over a time in which nobody has looked.
function withGaps([times, ...values]) {
  const steps = times.slice(1).map((each, n) => each - times[n]).sort((a, b) => a - b);
  const longest = Math.max(5, 4 * (steps[steps.length >> 1] ?? 0));
  const found = [[], ...values.map(() => [])];
  times.forEach((time, n) => {
    if (n && time - times[n - 1] > longest) {
      found[0].push((times[n - 1] + time) / 2);
      values.forEach((_, m) => found[m + 1].push(null));
    }
    found[0].push(time);
    values.forEach((each, m) => found[m + 1].push(each[n]));
  });
  return found;
}

export function draw(place, chart, figures) {
  if (!place.clientWidth) return;
  const data = withGaps(figures);
  const look = `${cssColour("--ink")} ${place.clientWidth} ${place.clientHeight}`;
  let known = charts.get(place);
  if (!known || known.look !== look) {
    known?.plot.destroy();
    known = { look, plot: make(place, chart, data) };
    charts.set(place, known);
  } else known.plot.setData(data);
}

function make(place, { series, show, steps, least = 1 }, data) {
  const muted = cssColour("--muted");
  const grid = { stroke: cssColour("--line"), width: 1 };
  const axis = { stroke: muted, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return new uPlot(
    {
      width: place.clientWidth,
      height: place.clientHeight || 112,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      padding: [8, 22, 0, 0],
      scales: { y: { range: (_, low, high) => [0, Math.max(least, high * 1.15)] } },
      axes: [
        { ...axis, size: 24, space: 70, grid: { show: false }, values: (_, at) => at.map((each) => new Date(each * 1000).toLocaleTimeString("en-GB")) },
        { ...axis, size: 62, space: 28, incrs: steps, values: (_, at) => at.map((each) => (each === 0 ? "0" : show(each))) },
      ],
      series: [
        {},
        ...series.map(([label, , colour]) => ({ label, stroke: cssColour(colour), width: 1.8, points: { show: false }, fill: series.length === 1 ? `color-mix(in srgb, ${cssColour(colour)} 14%, transparent)` : undefined })),
      ],
    },
    data,
    place,
  );
}
