// The view of space: what snapshots share, what each would free, and what gc and prune would delete. Only plans.
import { ask } from "./api.js";
import { bytes, drawHeat, drawScale } from "./charts.js";
import { clean, count, el } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { go, note } from "./router.js";
import { fact } from "./snapshot.js";

const RULES = [["prefix", "Below", "run1/"], ["keep_last", "Keep the last", "3"], ["keep_every", "Keep every", "1000"], ["keep_within", "Keep younger than", "7d"], ["keep_best", "Keep the best by", "loss"]];

export async function openSharing(main, parameters, signal) {
  const status = el("p", { class: "muted", role: "status" }, "Reading the manifests of all snapshots\u2026");
  main.append(el("section", { class: "card" }, el("h1", { class: "small" }, "Sharing"), status));
  const found = await ask("usage", {}, signal);
  const saved = found.logical_bytes ? 100 * (1 - found.stored_bytes / found.logical_bytes) : 0;
  status.replaceWith(el("div", { class: "facts-row" },
    fact("Snapshots", count(found.total), bytes(found.logical_bytes) + " without sharing"),
    fact("Stored", bytes(found.stored_bytes), saved > 0 ? `${saved.toFixed(0)} % less` : "packs and manifests"),
    fact("gc would free", bytes(found.gc.dead_bytes), `${count(found.gc.files)} files that no snapshot needs`),
    fact("Compression saves", bytes(found.compression_saved_bytes), "of what snapshots use")));
  const map = el("div", { id: "shared" }), scale = el("span");
  const table = el("div");
  main.append(
    found.series.length > 1 ? el("section", { class: "card", "aria-labelledby": "shared-title" }, el("div", { class: "bar" }, el("h2", { id: "shared-title" }, "Bytes that two series share"), el("span", { class: "spring" }), scale), map) : "",
    drawPrune(parameters, signal),
    el("section", { class: "card", "aria-labelledby": "own-title" }, el("h2", { id: "own-title" }, "What deleting one snapshot can free"), table));
  const draw = () => found.series.length > 1 && drawShared(found, map, scale);
  draw();
  document.addEventListener("themed", draw, { signal });
  const state = { rows: found.snapshots };
  const grid = new Grid(table, {
    label: "Snapshots by their own bytes", sort: parameters.sort || "-own_bytes", columns: columns(),
    read: async (offset, limit, sort) => {
      const field = sort.replace(/^-/, "") || "own_bytes", down = sort.startsWith("-") ? -1 : 1;
      state.rows.sort((p, q) => down * (field === "name" ? p.name.localeCompare(q.name, "en", { numeric: true }) : p[field] - q[field]));
      return { total: state.rows.length, rows: state.rows.slice(offset, offset + limit) };
    },
    open: (row) => go("snapshot", { name: row.name }), onSort: (sort) => note({ sort }), empty: "No snapshot was saved yet.",
  });
  await grid.reload(true);
  return { close: () => grid.close(), refresh: null };
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
  const names = found.series.map(clean);
  drawHeat(map, {
    label: `Bytes that two series share, up to ${bytes(most)}`, cells: found.shared,
    share: (size) => Math.min(1, size / most), rowNames: names.map((name, at) => `${name} ${at + 1}`), columnNames: names.map((_, at) => String(at + 1)),
    describe: (row, column) => [row === column ? names[row] : `${names[row]} and ${names[column]}`, (row === column ? "uses " : "both use ") + bytes(found.shared[row][column])],
    choose: (row) => go("snapshots", { filter: found.series[row] }),
  });
  scale.replaceChildren(drawScale(0, most, false, bytes));
}

function drawPrune(parameters, signal) {
  const boxes = RULES.map(([name, title, example]) => [name, el("label", {}, title + " ", el("input", { name, class: "rule", value: parameters[name] || "", placeholder: example, autocomplete: "off", spellcheck: "false" }))]);
  const answer = el("div", { id: "plan", "aria-live": "polite" });
  const form = el("form", { class: "bar" }, boxes.map(([, label]) => label), el("button", { type: "submit" }, "Plan"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const rules = Object.fromEntries(boxes.map(([name, label]) => [name, label.querySelector("input").value.trim()]));
    note(rules);
    try {
      const plan = await ask("prune", rules, signal);
      const doomed = plan.verdicts.filter((verdict) => !verdict.reasons.length).map((verdict) => clean(verdict.name));
      answer.replaceChildren(el("p", {}, `Prune would delete ${count(plan.delete)} snapshots and keep ${count(plan.keep)}; gc could then free ${bytes(plan.freed_bytes)}.`), doomed.length ? el("p", { class: "muted mono name plan" }, doomed.slice(0, 200).join(", ") + (doomed.length > 200 ? ", \u2026" : "")) : "");
    } catch (error) {
      if (error.name !== "AbortError") showError(answer, error);
    }
  });
  return el("section", { class: "card", "aria-labelledby": "prune-title" }, el("h2", { id: "prune-title" }, "What prune would delete"),
    el("p", { class: "muted help" }, "A plan only: this page deletes nothing. A snapshot is kept if any rule keeps it, or if it has a tag."), form, answer);
}
