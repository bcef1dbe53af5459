// The view of space: what series and snapshots share, what each would free, and what gc and prune would delete. Only plans.
import { ask } from "./api.js";
import { bytes, drawHeat, drawScale } from "./charts.js";
import { clean, count, el } from "./elements.js";
import { Grid } from "./grid.js";
import { drawPairs } from "./pairs.js";
import { drawPrune } from "./prune.js";
import { go, note } from "./router.js";
import { fact } from "./snapshot.js";

export async function openSharing(main, parameters, signal) {
  const facts = el("div", { class: "facts-row" }, el("p", { class: "muted", role: "status" }, "Reading the manifests of all snapshots\u2026"));
  const state = el("span", { class: "muted", id: "computed" });
  const again = el("button", { type: "button", class: "quiet", id: "again", disabled: true }, "Compute again");
  main.append(el("section", { class: "card" }, el("div", { class: "bar" }, el("h1", { class: "small" }, "Sharing"), el("span", { class: "spring" }), state, again), facts));
  const found = await ask("usage", { limit: 1 }, signal);
  const map = el("div", { id: "shared" }), scale = el("span"), table = el("div");
  const pairs = drawPairs(parameters, signal), prune = drawPrune(parameters, signal);
  main.append(
    found.series.length > 1 ? el("section", { class: "card", "aria-labelledby": "shared-title" }, el("div", { class: "bar" }, el("h2", { id: "shared-title" }, "Bytes that two series share"), el("span", { class: "spring" }), scale), el("p", { class: "muted help" }, "A series is all snapshots with the same name up to the last slash. The diagonal shows all that a series uses."), map) : "",
    pairs.card, prune.card,
    el("section", { class: "card", "aria-labelledby": "own-title" }, el("h2", { id: "own-title" }, "What deleting one snapshot can free"), table));
  const draw = (page) => {
    drawFacts(facts, page);
    state.textContent = `Computed ${clean(page.computed.replace("T", " ").replace("Z", " UTC"))}`;
    again.disabled = false;
  };
  draw(found);
  const drawSeries = () => found.series.length > 1 && drawShared(found, map, scale);
  drawSeries();
  document.addEventListener("themed", drawSeries, { signal });
  let isFresh = false;
  const grid = new Grid(table, {
    label: "Snapshots by their own bytes", sort: parameters.sort || "-own_bytes", columns: columns(),
    read: async (offset, limit, sort) => {
      const page = await ask("usage", { sort, offset, limit, fresh: isFresh ? "true" : "" }, signal);
      if (isFresh) draw(page);
      isFresh = false;
      return { total: page.total, rows: page.snapshots };
    },
    open: (row) => openStored(row.name, "snapshot", { name: row.name }), onSort: (sort) => note({ sort }), empty: "No snapshot was saved yet.",
  });
  again.addEventListener("click", async () => {
    isFresh = true;
    again.disabled = true;
    await grid.reload(true);
    again.disabled = false;
    await pairs.reload();
  });
  await Promise.all([grid.reload(true), pairs.reload()]);
  return { close: () => [grid, pairs, prune].forEach((part) => part.close()), refresh: null };
}

// Holdfast's own snapshots are recorded runs and compiled graphs, which have views of their own.
function openStored(name, view, parameters) {
  if (name.startsWith("@")) go(name.startsWith("@runs/") ? "runs" : "cache");
  else go(view, parameters);
}

function drawFacts(facts, found) {
  const saved = found.logical_bytes ? 100 * (1 - found.stored_bytes / found.logical_bytes) : 0;
  facts.replaceChildren(
    fact("Snapshots", count(found.total), bytes(found.logical_bytes) + " without sharing"),
    fact("Stored", bytes(found.stored_bytes), saved > 0 ? `${saved.toFixed(0)} % less` : "packs and manifests"),
    fact("gc would free", bytes(found.gc.dead_bytes), `${count(found.gc.files)} files that no snapshot needs`),
    fact("Compression saves", bytes(found.compression_saved_bytes), "of what snapshots use"),
    ...(found.sampled > 1 ? [fact("Estimated", `1 of ${count(found.sampled)} chunks`, "stand for all: the store has very many")] : []));
}

function columns() {
  const size = (name, title, tip) => ({ name, title, number: true, width: "110px", sort: name, tip, show: (row) => bytes(row[name]) });
  return [
    { name: "name", title: "Name", main: true, width: "minmax(220px, 3fr)", sort: "name", show: (row) => clean(row.name) },
    size("own_bytes", "Own", "bytes that no other snapshot uses"),
    { ...size("shared_bytes", "Shared", "bytes that other snapshots use as well"), wide: true },
    { ...size("stored_bytes", "Stored", "bytes in packs and manifests"), wide: true },
    { ...size("logical_bytes", "Size", "the size of the values, without sharing"), wide: true },
  ];
}

function drawShared(found, map, scale) {
  let most = 1;
  found.shared.forEach((line, row) => line.forEach((size, column) => { if (row !== column) most = Math.max(most, size); }));
  // If no two series share anything, the scale is that of the diagonal.
  const all = Math.max(...found.shared.map((line, at) => line[at]));
  if (most === 1) most = Math.max(1, all);
  const names = found.series.map(clean);
  drawHeat(map, {
    label: `Bytes that two series share, up to ${bytes(most)}`, cells: found.shared,
    share: (size) => Math.min(1, size / most), rowNames: names.map((name, at) => `${name} ${at + 1}`), columnNames: names.map((_, at) => String(at + 1)),
    describe: (row, column) => [row === column ? names[row] : `${names[row]} and ${names[column]}`, (row === column ? "uses " : "both use ") + bytes(found.shared[row][column])],
    choose: (row) => openStored(found.series[row], "snapshots", { filter: found.series[row] }),
  });
  // What a series uses may be far more than it shares, and would leave all other cells pale.
  scale.replaceChildren(drawScale(0, most, false, (size) => bytes(size) + (size && all > most ? " or more" : "")));
}
