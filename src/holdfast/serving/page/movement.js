// How far each layer moves from one snapshot of a series to the next: a map of layers and steps, and a line for one layer.
import { askLines } from "./api.js";
import { bytes, drawHeat, drawLines, drawLogScale, drawMeanings, logShare, progress, when } from "./charts.js";
import { clean, count, el, numeral, short } from "./elements.js";
import { showError } from "./errors.js";
import { address, go, note } from "./router.js";

const UNKNOWN = "not known: new, or of another shape", BROKEN = "values became NaN or infinite, or ceased to be";
const natural = new Intl.Collator("en", { numeric: true });

export async function openMovement(main, parameters, signal) {
  const view = new MovementView(main, parameters, signal);
  view.start();
  return { close: () => view.stop(), refresh: null };
}

class MovementView {
  constructor(main, parameters, signal) {
    Object.assign(this, { signal, parameters, layer: parameters.layer || "", pairs: [], rows: [], more: 0, head: null, cell: null });
    this.error = el("div");
    this.status = el("p", { class: "muted", id: "moves-status", role: "status", "aria-live": "polite" });
    this.done = el("div", { class: "bar", id: "progress" });
    this.map = el("div", { id: "moves", class: "tall" });
    this.scale = el("span", { class: "legend" });
    this.plot = el("div", { class: "plot", id: "moves-plot" });
    this.title = el("h2", { id: "layer-title", class: "name" }, "One layer");
    this.links = el("div", { class: "bar", id: "moves-links" });
    this.mapCard = el("section", { class: "card", "aria-labelledby": "moves-title", hidden: true }, el("div", { class: "bar" }, el("h2", { id: "moves-title" }, "Layers"), el("span", { class: "spring" }), this.scale),
      el("p", { class: "muted help" }, "Columns are snapshots in order, each compared with the one before. Click a row, or press Enter on it, to plot it below."), this.map);
    this.plotCard = el("section", { class: "card", "aria-labelledby": "layer-title", hidden: true }, this.title, this.links, this.plot);
    main.append(el("section", { class: "card" }, this.drawForm(), el("p", { class: "muted help" }, "The relative L2 distance of each layer from the snapshot before. Layers that are equal are not read."), this.error, this.status, this.done), this.mapCard, this.plotCard);
    document.addEventListener("themed", () => this.draw(), { signal });
    this.sizes = new ResizeObserver(() => this.drawPlot());
    this.sizes.observe(this.plot);
  }

  drawForm() {
    const box = (name, title, example) => el("input", { name, type: name === "filter" ? "search" : "text", value: this.parameters[name] || "", placeholder: example, "aria-label": title, autocomplete: "off", spellcheck: "false" });
    const filter = box("filter", "Which snapshots", "run1/   run*/step-?00   step > 400"), leaves = box("leaves", "Which tensors", "parameters; or a part of names, or *.weight");
    this.series = el("select", { "aria-label": "Which series", hidden: true, onchange: () => this.change({ series: this.series.value, layer: "" }) });
    const by = el("select", { "aria-label": "Rows", id: "by", onchange: () => this.change({ by: by.value === "leaf" ? "leaf" : "", layer: "" }) }, [["layer", "by layer"], ["leaf", "by tensor"]].map(([value, title]) => el("option", { value, selected: value === this.parameters.by }, title)));
    const most = el("select", { "aria-label": "How many snapshots", id: "most", onchange: () => this.change({ limit: most.value === "32" ? "" : most.value }) }, ["8", "16", "32", "64", "128"].map((value) => el("option", { value, selected: value === (this.parameters.limit || "32") }, `at most ${value} snapshots`)));
    const form = el("form", { class: "bar filters" }, el("h1", { class: "small" }, "Movement"), el("label", { class: "search" }, filter), this.series, el("label", { class: "search" }, leaves), by, most, el("button", { type: "submit" }, "Measure"));
    form.addEventListener("submit", (event) => { event.preventDefault(); this.change({ filter: filter.value.trim(), leaves: leaves.value.trim(), series: "", layer: "" }); });
    return form;
  }

  // Opens the view with other parameters; the same ones measure again.
  change(parameters) {
    const next = address("movement", { ...this.parameters, ...parameters });
    if (next === location.hash) this.start();
    else location.hash = next;
  }

  stop() {
    this.sizes.disconnect();
    if (this.running) this.running.abort();
  }

  async start() {
    if (this.running) this.running.abort();
    this.running = new AbortController();
    Object.assign(this, { pairs: [], rows: [], more: 0, head: null });
    this.error.replaceChildren();
    this.done.replaceChildren(el("span", { class: "muted" }, "Reading manifests\u2026"));
    const { filter, series, leaves, by, limit } = this.parameters, signal = AbortSignal.any([this.signal, this.running.signal]);
    let drawn = 0;
    try {
      for await (const found of askLines("movement", { filter, series, leaves, by, limit }, signal)) {
        if (found.names) this.begin(found);
        else if (found.layers) this.add(found);
        this.drawProgress(found);
        if (performance.now() - drawn > 300) { this.draw(); drawn = performance.now(); }
      }
      this.done.replaceChildren();
    } catch (error) {
      this.done.replaceChildren();
      if (error.name !== "AbortError") showError(this.error, error);
      else if (this.head) this.done.replaceChildren(el("span", { class: "muted", id: "stopped" }, `Stopped after ${count(this.pairs.length)} of ${count(this.head.names.length - 1)} comparisons.`));
    }
    this.draw();
  }

  begin(head) {
    this.head = head;
    this.series.hidden = head.series.length < 2;
    this.series.replaceChildren(...head.series.map((one) => el("option", { value: one.name, selected: one.name === head.chosen }, `${clean(one.name) || "(no series)"} (${count(one.snapshots)})`)));
    const some = head.names.length < head.total ? `${count(head.names.length)} of ${count(head.total)} snapshots, at equal distances,` : `all ${count(head.total)} snapshots`;
    const per = head.per === "step" ? "Distances are divided by the number of steps between two snapshots." : "Not all snapshots have a step: distances are those from snapshot to snapshot.";
    this.status.textContent = `Compares ${some} of ${clean(head.chosen) || "the store"}. ${per}`;
  }

  add(pair) {
    this.pairs[pair.pair] = pair;
    this.more = Math.max(this.more, pair.more);
    const known = new Set(this.rows);
    const fresh = Object.keys(pair.layers).filter((name) => !known.has(name));
    if (fresh.length) this.rows = [...this.rows, ...fresh].sort(natural.compare);
  }

  drawProgress(found) {
    const all = this.head.names.length - 1, part = found.total_bytes ? found.done_bytes / found.total_bytes : found.layers ? 1 : 0;
    const done = (found.pair || 0) + part;
    const stop = el("button", { type: "button", class: "quiet", id: "stop", onclick: () => this.running.abort() }, "Stop");
    this.done.replaceChildren(progress(done, all), el("span", { class: "muted" }, `${count(this.pairs.length)} of ${count(all)} comparisons${found.total_bytes ? `; ${bytes(found.done_bytes)} of ${bytes(found.total_bytes)}` : ""}`), stop);
  }

  value(row, column) {
    const pair = this.pairs[column], found = pair ? pair.layers[this.rows[row]] : undefined;
    return found === undefined || found === null ? null : numeral(found);
  }

  columnName(column) {
    return this.head.steps ? count(this.head.steps[column + 1]) : String(column + 2);
  }

  get unit() {
    return this.head.per === "step" ? "per step" : "from snapshot to snapshot";
  }

  draw() {
    const wide = this.head ? this.head.names.length - 1 : 0;
    this.mapCard.hidden = !this.rows.length;
    if (!this.rows.length) {
      if (this.pairs.length) this.status.textContent = "No tensor to measure here: choose others above, such as *.weight.";
      return;
    }
    let low = Infinity, high = 0;
    const cells = this.rows.map((_, row) => Array.from({ length: wide }, (_, column) => this.value(row, column)));
    for (const line of cells) for (const cell of line) if (cell > 0 && Number.isFinite(cell)) [low, high] = [Math.min(low, cell), Math.max(high, cell)];
    const top = this.map.scrollTop;
    drawHeat(this.map, {
      label: `How far each of ${count(this.rows.length)} layers moves over ${count(wide)} comparisons, from ${short(low)} to ${short(high)} ${this.unit}`,
      cells, share: logShare(low, high), rowNames: this.rows.map((name) => clean(name) || "(the tree)"), columnNames: cells[0].map((_, column) => this.columnName(column)),
      describe: (row, column) => [clean(this.rows[row]), `${clean(this.head.names[column])} to ${clean(this.head.names[column + 1])}`, this.describe(cells[row][column])],
      choose: (row, column) => this.choose(this.rows[row], column),
    });
    this.map.scrollTop = top;
    const flat = cells.flat(), meanings = { ...(flat.includes(0) ? { zero: "equal" } : {}), ...(flat.includes(null) ? { none: UNKNOWN } : {}), ...(flat.some(Number.isNaN) ? { bad: BROKEN } : {}) };
    this.scale.replaceChildren(...drawMeanings(meanings), ...(high ? [drawLogScale(low, high)] : []), ...(this.more ? [el("span", { class: "muted" }, ` ${count(this.more)} more layers are not shown`)] : []));
    if (!this.rows.includes(this.layer)) this.layer = this.rows[this.findFarthest(cells)];
    this.drawPlot();
  }

  describe(value) {
    if (Number.isNaN(value)) return BROKEN;
    return value === null ? UNKNOWN : value === 0 ? "equal" : `${short(value)} ${this.unit}`;
  }

  findFarthest(cells) {
    const far = cells.map((line) => Math.max(0, ...line.filter((cell) => Number.isFinite(cell))));
    return far.indexOf(Math.max(...far));
  }

  choose(layer, column) {
    this.layer = layer;
    this.cell = column;
    note({ layer });
    this.drawPlot();
    this.plotCard.scrollIntoView({ block: "nearest" });
  }

  drawPlot() {
    const row = this.rows.indexOf(this.layer);
    this.plotCard.hidden = row < 0;
    if (row < 0 || !this.plot.clientWidth) return;
    this.title.textContent = clean(this.layer);
    const x = (column) => (this.head.steps ? this.head.steps[column + 1] : this.head.time_s[column + 1]);
    const columns = this.pairs.map((_, column) => column);
    const line = (name, find) => ({ name, points: columns.map((column) => ({ x: x(column), y: find(column), column, name })).filter((point) => point.y !== null && Number.isFinite(point.y)) });
    const median = (column) => { const all = this.rows.map((_, at) => this.value(at, column)).filter((value) => value !== null && !Number.isNaN(value)).sort((p, q) => p - q); return all.length ? all[all.length >> 1] : null; };
    const isStep = Boolean(this.head.steps);
    drawLines(this.plot, {
      label: `How far ${clean(this.layer)} moves ${this.unit}, and the median of all layers`, xName: isStep ? "step" : "saved", yName: `relative L2 ${this.unit}`, xLeast: isStep ? 1 : 60, xWidth: isStep ? 90 : 160,
      series: [line(clean(this.layer), (column) => this.value(row, column)), ...(this.rows.length > 1 ? [line("median of all layers", median)] : [])].filter((one) => one.points.length),
      showX: isStep ? (value) => count(value) : when, showY: short,
      describe: (point) => [point.name, `${clean(this.head.names[point.column])} to ${clean(this.head.names[point.column + 1])}`, this.describe(point.y)],
      choose: (point) => this.openPair(point.column),
    });
    const last = this.cell === null ? this.pairs.length - 1 : this.cell, inner = this.parameters.by === "leaf" ? null : { ...this.parameters, series: this.head.chosen, leaves: this.layer + ".", by: "leaf", layer: "" };
    this.links.replaceChildren(
      ...(inner ? [el("a", { class: "button", id: "tensors", href: address("movement", inner) }, "Tensors of this layer")] : []),
      ...(this.pairs[last] ? [el("a", { class: "button", id: "compare", href: address("compare", { a: this.head.names[last], b: this.head.names[last + 1], filter: this.layer }) }, `Compare ${clean(this.head.names[last])} and ${clean(this.head.names[last + 1])}`)] : []));
  }

  openPair(column) {
    go("compare", { a: this.head.names[column], b: this.head.names[column + 1], filter: this.layer });
  }
}
