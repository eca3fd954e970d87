// References, collectives and SPMD mode: tables of what extensions of the agent tell.

import { byId, bytes, el, keyed, meter, seconds, setText, table, whole } from "./dom.js";

const NAMED_RANKS = 16;

export function showMemory(view, open) {
  const largest = Math.max(1, ...view.workers.map((each) => each.memory));
  table(
    byId("memory"),
    [
      { title: "Worker", show: (each) => el("button", { class: "link", type: "button", onclick: () => open(each.name) }, each.name) },
      { title: "Host", show: (each) => each.host },
      { title: "Resident", class: "num", show: (each) => meter(bytes(each.memory), each.memory / largest) },
      { title: "Shared memory", class: "num", show: (each) => bytes(each.shared) },
      { title: "Used by receivers", class: "num", show: (each) => bytes(each.lent) },
      { title: "Waits to be sent", class: "num", show: (each) => bytes(each.unsent) },
      { title: "Objects", class: "num", show: (each) => whole(each.objects) },
      { title: "Autograd contexts", class: "num", show: (each) => whole(each.contexts) },
    ],
    [...view.workers].sort((a, b) => b.memory - a.memory),
    (each) => each.name,
    "No worker has written its state yet.",
  );
}

export function showReferences(view) {
  const { objects, left_out } = view.references;
  const holders = (each) => each.holders.map(([name, count]) => (count > 1 ? `${name} × ${count}` : name)).join(", ") || "nobody else";
  table(
    byId("references"),
    [
      { title: "Owner", show: (each) => each.owner },
      { title: "Object", class: "mono", show: (each) => each.id },
      { title: "Type", class: "mono cut", show: (each) => each.type || "–" },
      { title: "Size", class: "num", show: (each) => (each.bytes ? bytes(each.bytes) : "–") },
      { title: "State", show: (each) => each.state.toLowerCase() },
      { title: "Held by", class: "wrap", show: holders },
    ],
    objects,
    (each) => `${each.owner} ${each.id}`,
    "No worker owns an object to which remote references exist: rpc.remote() makes them." + (left_out ? ` ${left_out} objects are not listed.` : ""),
  );
}

export function showWeights(view) {
  const rows = view.weights.flatMap((store) => {
    const versions = [...store.versions].reverse().map((each) => ({ store, ...each, missing: "" }));
    const open = Object.entries(store.open).map(([number, missing]) => ({ store, number, missing, tags: [], leases: [], readers: [] }));
    return versions.length + open.length ? [...versions, ...open] : [{ store, number: "–", missing: store.copy ? "a host's copy" : "no version", tags: [], leases: [], readers: [] }];
  });
  table(
    byId("weights"),
    [
      { title: "Store", show: (each) => `${each.store.name} on ${each.store.worker}` },
      { title: "Version", class: "num", show: (each) => [each.number, ...each.tags].join(" ") },
      { title: "Age", class: "num", show: (each) => (each.age === undefined ? each.missing : seconds(each.age)) },
      { title: "Size", class: "num", show: (each) => (each.bytes ? bytes(each.bytes) : "–") },
      { title: "Read by", class: "wrap", show: (each) => each.readers.join(", ") || "nobody" },
      { title: "Leased by", class: "wrap", show: (each) => each.leases.join(", ") || "nobody" },
      { title: "Memory of the store", class: "num", show: (each) => bytes(each.store.bytes) },
      { title: "Saved by differences", class: "num", show: (each) => (each.store.saved ? bytes(each.store.saved) : "–") },
    ],
    rows,
    (each) => `${each.store.worker} ${each.store.name} ${each.number}`,
    "No worker keeps a weight store: weights.Store() makes one.",
  );
}

export function showCollectives(view) {
  const { groups, operations } = view.collectives;
  const place = byId("groups");
  if (!place._empty) place.append((place._list = el("div")), (place._empty = el("p", { class: "empty" }, "No process group exists: torch.distributed with the backend farcall makes them.")));
  place._empty.hidden = groups.length > 0;
  keyed(place._list, groups, (each) => each.name, () => el("div", { class: "group" }, el("p", {}, el("b"), " ", el("span", { class: "muted" })), el("div", { class: "ranks", "aria-hidden": "true" }), el("p", { class: "small" })), (node, each) => {
    const [head, ranks, note] = node.children;
    setText(head.firstChild, /^\d+$/.test(each.name) ? `Group ${each.name}` : each.name);
    setText(head.lastChild, `${each.ranks.length} ranks · ${whole(each.furthest)} operations begun${each.operations.length ? ` · last: ${each.operations.join(" and ")}` : ""}`);
    keyed(ranks, each.ranks, (rank) => rank.worker, () => el("i"), (cell, rank) => {
      cell.className = rank.number < each.furthest ? "behind" : "";
      cell.title = `${rank.worker}: ${rank.number}, ${rank.operation}`;
      setText(cell, each.ranks.length > NAMED_RANKS ? "" : rank.worker);
    });
    setText(note, each.behind.length ? `Not there yet: ${each.behind.slice(0, 12).join(", ")}${each.behind.length > 12 ? ` and ${each.behind.length - 12} more` : ""}` : "All ranks are equally far.");
  });
  table(
    byId("operations"),
    [
      { title: "Operation", class: "mono", show: (each) => each.name },
      { title: "Done", class: "num", show: (each) => String(each.count) },
      { title: "Running", class: "num", show: (each) => String(each.running) },
      { title: "Mean", class: "num", show: (each) => (each.count ? milli(each.seconds / each.count) : "–") },
      { title: "Longest", class: "num", show: (each) => (each.count ? milli(each.longest) : "–") },
      { title: "Bytes", class: "num", show: (each) => bytes(each.bytes) },
      { title: "Bytes/s", class: "num", show: (each) => (each.seconds && each.bytes ? `${bytes(each.bytes / each.seconds)}/s` : "–") },
    ],
    operations,
    (each) => each.name,
    "No collective was called lately: all_reduce, broadcast and others of torch.distributed with the backend farcall are listed here.",
  );
}

const milli = (value) => (value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 2 : 0)} ms` : seconds(value));

export function showSpmd(view) {
  const place = byId("spmd");
  if (!place._empty) place.append((place._list = el("div")), (place._empty = el("article", { class: "card wide" }, el("h2", {}, "SPMD mode"), el("p", { class: "empty" }, "No worker drives SPMD mode: spmd.use_spmd() turns it on."))));
  place._empty.hidden = view.spmd.length > 0;
  keyed(place._list, view.spmd, (each) => each.driver, () => driver(), showDriver);
}

function driver() {
  return el(
    "div", { class: "driver" },
    el("article", { class: "card wide" }, el("h2"), el("dl", { class: "facts" })),
    el("article", { class: "card wide" }, el("h2", {}, "Layouts of its tensors"), el("div", { class: "scroll" })),
    el("article", { class: "card wide" }, el("h2", {}, "Moved, because an operation needs another layout"), el("div", { class: "scroll" })),
  );
}

function showDriver(node, each) {
  const [head, layouts, moved] = node.children;
  setText(head.firstChild, `${each.driver} drives ${each.workers} workers`);
  const facts = { Programs: each.counts.programs, "New programs": each.counts.new, Uploads: each.counts.uploads, Uploaded: bytes(each.counts.uploaded_bytes), Fetches: each.counts.fetches };
  keyed(head.lastChild, Object.entries(facts), ([name]) => name, ([name]) => el("div", {}, el("dt", {}, name), el("dd")), (row, [, value]) => setText(row.lastChild, typeof value === "string" ? value : whole(value)));
  table(
    layouts.lastChild,
    [
      { title: "Type", class: "mono", show: (one) => `${one.dtype}[${one.shape.join(", ")}]` },
      { title: "Mesh", class: "mono", show: (one) => one.mesh.join(" × ") || "–" },
      { title: "Placements", class: "mono", show: (one) => one.placements.join(", ") || "replicated" },
      { title: "Tensors", class: "num", show: (one) => whole(one.count) },
      { title: "Bytes", class: "num", show: (one) => bytes(one.bytes) },
    ],
    each.layouts,
    (one) => JSON.stringify([one.dtype, one.shape, one.mesh, one.placements]),
    "No tensor is on its workers.",
  );
  table(
    moved.lastChild,
    [
      { title: "Operator", class: "mono", show: (one) => one.operator },
      { title: "Where", class: "mono cut", show: (one) => one.where },
      { title: "What", class: "wrap", show: (one) => one.note },
      { title: "Times", class: "num", show: (one) => String(one.count) },
      { title: "Bytes", class: "num", show: (one) => bytes(one.bytes) },
    ],
    each.moved,
    (one) => JSON.stringify([one.operator, one.where, one.note]),
    "No tensor had to be moved.",
  );
}
