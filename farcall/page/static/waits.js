// What waits for what: boxes in layers, arrows between them; cycles in red.

import { byId, el, seconds, setText } from "./dom.js";

const LANES = 4;
const NEXT = 50; // pixels between boxes that have no other between them

let shown = "";

export function drawWaits(view, open) {
  const { boxes, arrows, left_out } = view.waits;
  const card = byId("waits-card");
  const quiet = view.job.state === "moving" && !view.findings.some((each) => each.kind === "cycle");
  card.hidden = !boxes.length || quiet;
  if (card.hidden) return;
  const signature = JSON.stringify([boxes.map((each) => [each.workers, each.count, each.thread, each.text, each.place, each.remark, each.depth, each.cycle, each.culprit]), arrows]);
  const place = byId("waits");
  if (signature !== shown) {
    shown = signature;
    place.replaceChildren(build(boxes, open));
  }
  const detours = new Set(arrows.filter((each) => each.back || boxes[each.to].depth !== boxes[each.from].depth + 1));
  place.firstChild.classList.toggle("returns", detours.size > 0);
  boxes.forEach((box, n) => setText(place.querySelector(`[data-box="${n}"] .time`), words(box)));
  setText(byId("waits-note"), left_out ? `${left_out} more are not drawn` : "");
  connect(place.firstChild, boxes, arrows, detours);
}

function words(box) {
  const time = box.seconds >= 1 ? seconds(box.seconds) : "";
  return !time ? box.text : box.text.startsWith("waits") ? `waits ${time}${box.text.slice(5)}` : `${box.text}, ${time}`;
}

function build(boxes, open) {
  const layers = el("div", { class: "layers" }, el("svg", { "aria-hidden": "true" }));
  const depth = Math.max(...boxes.map((each) => each.depth));
  for (let at = 0; at <= depth; at++) {
    const layer = el("div", { class: "layer" });
    boxes.forEach((box, n) => {
      if (box.depth !== at) return;
      const who = box.count === 1 ? box.workers[0] : `${box.workers[0]} and ${box.count - 1} more`;
      const kind = box.cycle ? " cycle" : box.culprit ? " culprit" : "";
      layer.append(
        el(
          "button",
          { class: `box${kind}`, "data-box": n, type: "button", onclick: () => open(box.workers[0]), title: box.workers.join(", ") },
          el("b", {}, `${who}${box.thread ? ` · ${box.thread}` : ""}`),
          el("span", { class: "time" }),
          box.place ? el("span", { class: "place" }, `${box.place}${box.function ? ` in ${box.function}` : ""}`) : null,
          box.remark ? el("span", { class: "muted" }, box.remark) : null,
        ),
      );
    });
    if (layer.childNodes.length) layers.append(layer);
  }
  return layers;
}

function connect(layers, boxes, arrows, detours) {
  const svg = layers.firstChild;
  const origin = layers.getBoundingClientRect();
  const upright = getComputedStyle(layers).flexDirection === "column";
  const places = boxes.map((_, n) => layers.querySelector(`[data-box="${n}"]`).getBoundingClientRect());
  const bottom = Math.max(...places.map((each) => each.bottom)) - origin.top;
  const paths = [];
  let lane = 0;
  for (const arrow of arrows) {
    const from = places[arrow.from], to = places[arrow.to];
    const kind = arrow.cycle ? "cycle" : "";
    const drawn = upright ? vertical(from, to, origin) : detours.has(arrow) ? around(from, to, origin, bottom, lane++ % LANES) : horizontal(from, to, origin);
    paths.push(el("path", { class: `arrow ${kind}`, d: drawn.d }), el("polygon", { class: `tip ${kind}`, points: "0,0 -9,4.5 -9,-4.5", transform: `translate(${drawn.x} ${drawn.y}) rotate(${drawn.angle})` }));
  }
  svg.replaceChildren(...paths);
}

// Between neighbouring layers.
function horizontal(from, to, origin) {
  const x1 = from.right - origin.left, y1 = (from.top + from.bottom) / 2 - origin.top;
  const x = to.left - origin.left - 2, y = (to.top + to.bottom) / 2 - origin.top;
  const bend = (x - x1) / 2;
  return { d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x - bend} ${y} ${x - 7} ${y}`, x, y, angle: 0 };
}

// Through the gaps between layers, and below all boxes: to an earlier layer, or past a layer.
function around(from, to, origin, bottom, lane) {
  const gap = 12 + 5 * lane, low = bottom + 10 + 6 * lane;
  const x1 = from.right - origin.left, y1 = (from.top + from.bottom) / 2 - origin.top + 4 * lane;
  const y = (to.top + to.bottom) / 2 - origin.top + 9;
  const onward = to.left > from.right;
  const x = (onward ? to.left - 2 : to.right + 2) - origin.left;
  const last = onward ? x - gap : x + gap;
  return { d: `M${x1} ${y1} H${x1 + gap} V${low} H${last} V${y} H${onward ? x - 7 : x + 7}`, x, y, angle: onward ? 0 : 180 };
}

// To the box below, or past others on their right.
function vertical(from, to, origin) {
  if (to.top < from.bottom || to.top - from.bottom > NEXT) {
    const x1 = from.right - origin.left, y1 = (from.top + from.bottom) / 2 - origin.top;
    const x = to.right - origin.left + 2, y = (to.top + to.bottom) / 2 - origin.top;
    const far = Math.max(x1, x) + 15, turn = to.top < from.bottom ? -16 : 16;
    return { d: `M${x1} ${y1} C${far} ${y1} ${far} ${y1} ${far} ${y1 + turn} L${far} ${y - turn} C${far} ${y} ${far} ${y} ${x + 7} ${y}`, x, y, angle: 180 };
  }
  const x1 = (from.left + from.right) / 2 - origin.left, y1 = from.bottom - origin.top;
  const x = (to.left + to.right) / 2 - origin.left, y = to.top - origin.top - 2;
  return { d: `M${x1} ${y1} C${x1} ${y1 + 14} ${x} ${y - 20} ${x} ${y - 7}`, x, y, angle: 90 };
}
