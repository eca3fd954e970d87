// What waits for what: boxes in layers, arrows between them; cycles in red.

import { byId, el, seconds, setText } from "./dom.js";

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
  place.firstChild.classList.toggle("returns", arrows.some((each) => each.back));
  boxes.forEach((box, n) => setText(place.querySelector(`[data-box="${n}"] .time`), words(box)));
  setText(byId("waits-note"), left_out ? `${left_out} more are not drawn` : "");
  connect(place.firstChild, arrows);
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

function connect(layers, arrows) {
  const svg = layers.firstChild;
  const origin = layers.getBoundingClientRect();
  const upright = getComputedStyle(layers).flexDirection === "column";
  const paths = [];
  for (const arrow of arrows) {
    const from = layers.querySelector(`[data-box="${arrow.from}"]`).getBoundingClientRect();
    const to = layers.querySelector(`[data-box="${arrow.to}"]`).getBoundingClientRect();
    const kind = arrow.cycle ? "cycle" : "";
    const drawn = (upright ? vertical : horizontal)(from, to, origin, arrow.back);
    paths.push(el("path", { class: `arrow ${kind}`, d: drawn.d }), el("polygon", { class: `tip ${kind}`, points: "0,0 -9,4.5 -9,-4.5", transform: `translate(${drawn.x} ${drawn.y}) rotate(${drawn.angle})` }));
  }
  svg.replaceChildren(...paths);
}

function horizontal(from, to, origin, back) {
  if (back || to.left < from.right) {
    const x1 = (from.left + from.right) / 2 - origin.left, y1 = from.bottom - origin.top;
    const x = (to.left + to.right) / 2 - origin.left, y = to.bottom - origin.top + 2;
    const low = Math.max(y1, y) + 26;
    return { d: `M${x1} ${y1} C${x1} ${low} ${x1} ${low} ${x1 - 24} ${low} L${x + 24} ${low} C${x} ${low} ${x} ${low} ${x} ${y + 8}`, x, y, angle: -90 };
  }
  const x1 = from.right - origin.left, y1 = (from.top + from.bottom) / 2 - origin.top;
  const x = to.left - origin.left - 2, y = (to.top + to.bottom) / 2 - origin.top;
  const bend = (x - x1) / 2;
  return { d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x - bend} ${y} ${x - 7} ${y}`, x, y, angle: 0 };
}

function vertical(from, to, origin, back) {
  if (back || to.top < from.bottom) {
    const x1 = from.right - origin.left, y1 = (from.top + from.bottom) / 2 - origin.top;
    const x = to.right - origin.left + 2, y = (to.top + to.bottom) / 2 - origin.top;
    const far = Math.max(x1, x) + 15;
    return { d: `M${x1} ${y1} C${far} ${y1} ${far} ${y1} ${far} ${y1 - 16} L${far} ${y + 16} C${far} ${y} ${far} ${y} ${x + 7} ${y}`, x, y, angle: 180 };
  }
  const x1 = (from.left + from.right) / 2 - origin.left, y1 = from.bottom - origin.top;
  const x = (to.left + to.right) / 2 - origin.left, y = to.top - origin.top - 2;
  return { d: `M${x1} ${y1} C${x1} ${y1 + 14} ${x} ${y - 20} ${x} ${y - 7}`, x, y, angle: 90 };
}
