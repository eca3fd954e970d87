// Elements and numbers. Texts are only ever set as text: nothing that a job names becomes markup.

export function el(tag, attributes = {}, ...children) {
  const svg = SVG_TAGS.has(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null) made.append(child);
  return made;
}

const SVG_TAGS = new Set(["svg", "g", "path", "circle", "text", "title", "polygon"]);

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Children of a parent, one for each item, made once and updated afterwards: focus and scrolling stay.
export function keyed(parent, items, key, make, update) {
  const known = parent._byKey ?? (parent._byKey = new Map());
  const wanted = new Set();
  let before = null;
  for (const item of items) {
    const name = key(item);
    wanted.add(name);
    let node = known.get(name);
    if (!node) known.set(name, (node = make(item)));
    update?.(node, item);
    const next = before ? before.nextSibling : parent.firstChild;
    if (next !== node) parent.insertBefore(node, next);
    before = node;
  }
  for (const [name, node] of known) {
    if (!wanted.has(name)) {
      node.remove();
      known.delete(name);
    }
  }
}

export function seconds(value) {
  if (value < 0.05) return "–";
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)}\u00a0s`;
  return value < 7200 ? `${Math.round(value / 60)}\u00a0min` : `${Math.round(value / 3600)}\u00a0h`;
}

export function bytes(value) {
  if (!value) return "–";
  const unit = Math.max(0, Math.min(Math.floor(Math.log2(value) / 10), 4));
  const shown = value / 2 ** (10 * unit);
  return `${shown < 10 && unit ? shown.toFixed(1) : Math.round(shown)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export const whole = (value) => Math.round(value ?? 0).toLocaleString("en");

export function rate(value) {
  if (!value) return "0";
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function clock(at) {
  if (!at) return "–";
  const time = new Date(at * 1000);
  const today = new Date().toDateString() === time.toDateString();
  const hours = time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: today ? "2-digit" : undefined });
  return today ? hours : `${time.toLocaleDateString("en-CA")} ${hours}`;
}

// How a worker's state looks: a tone, and a sign, so that colour is not all that tells.
export function look(worker) {
  const waits = worker.oldest >= 2;
  return (
    {
      dead: ["bad", "✕"],
      failed: ["bad", "✕"],
      left: ["off", "–"],
      traced: ["odd", "‖"],
      stopped: ["odd", "‖"],
      frozen: ["odd", "❄"],
      computes: ["ok", ""],
    }[worker.state] ?? (waits ? ["warn", "…"] : worker.state === "running" ? ["ok", ""] : ["off", "○"])
  );
}

export const stateWord = (worker) => (worker.state === "running" && worker.oldest >= 2 ? "waits" : worker.state);

// A number, with a bar for its share of the largest.
export function meter(text, share) {
  const bar = el("i");
  bar.style.width = `${Math.round(100 * Math.min(1, share || 0))}%`;
  return el("span", {}, text, el("span", { class: "meter", "aria-hidden": "true" }, bar));
}

// A table whose rows stay the same elements while their cells change.
export function table(place, columns, rows, key, empty) {
  if (!place._table) {
    const head = el("tr", { role: "row" });
    for (const column of columns) head.append(el("th", { role: "columnheader", scope: "col", class: column.class ?? "" }, column.title));
    place._table = el("tbody", { role: "rowgroup" });
    // Narrow windows show rows as lines, each value with its title: the roles keep it a table there.
    place.append(el("table", { class: "folds", role: "table" }, el("thead", { role: "rowgroup" }, head), place._table), el("p", { class: "empty" }, empty ?? ""));
  }
  place.firstChild.hidden = !rows.length;
  place.lastChild.hidden = rows.length > 0;
  keyed(
    place._table,
    rows,
    key,
    () => el("tr", { role: "row" }, columns.map((column) => el("td", { role: "cell", class: column.class ?? "", "data-title": column.title }))),
    (row, item) => columns.forEach((column, n) => fill(row.children[n], column.show(item))),
  );
}

export function fill(cell, shown) {
  if (shown instanceof Node) {
    if (cell.firstChild?.textContent !== shown.textContent || cell.firstChild?.nodeName !== shown.nodeName || !cell.contains(document.activeElement)) cell.replaceChildren(shown);
  } else setText(cell, shown);
}
