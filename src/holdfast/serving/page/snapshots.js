// The view of all snapshots: a filter, their numbers over steps or times, and a table.
import { ask } from "./api.js";
import { bytes, drawLines, ends, sparkline, when } from "./charts.js";
import { clean, count, el, numeral, short } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { drawLineage, seriesOf } from "./lineage.js";
import { address, go, note } from "./router.js";

const SHOWN_METRICS = 4, MAX_TILES = 7, MAX_SERIES = 12;
const SIZE = "size";
const NOT_FINITE = { nan: "NaN" };

export async function openSnapshots(main, parameters, signal) {
  const view = new SnapshotsView(main, parameters, signal);
  await view.start();
  return { close: () => view.grid.close(), refresh: () => view.reload() };
}

class SnapshotsView {
  constructor(main, parameters, signal) {
    this.signal = signal;
    this.filter = parameters.filter || "";
    this.chosen = parameters.metric || "";
    this.by = parameters.by === "time" ? "time" : "step";
    this.isLog = parameters.log === "true";
    this.lineageState = parameters.lineage;
    this.picked = [];
    this.sizes = new Map();
    this.asked = new Set();
    this.metrics = [];
    this.box = el("input", { type: "search", id: "filter", value: this.filter, placeholder: "run1/   run*/step-?00   loss < 0.3 and age < 2d", autocomplete: "off", spellcheck: "false", "aria-describedby": "filter-help" });
    this.status = el("span", { class: "muted", id: "shown", role: "status", "aria-live": "polite" });
    this.strip = el("div", { class: "metrics", role: "group", "aria-label": "Numbers; press one to plot it" });
    this.plot = el("div", { class: "plot", id: "timeline" });
    this.lineage = el("section", { class: "card", id: "lineage", hidden: true, "aria-labelledby": "lineage-title" });
    this.error = el("div");
    this.choice = el("div", { class: "bar", id: "picked" });
    this.movement = el("a", { class: "button", id: "movement" }, "How far each layer moves");
    this.table = el("div");
    main.append(
      el("section", { class: "card", "aria-labelledby": "snapshots-title" },
        el("div", { class: "bar filters" }, el("h1", { id: "snapshots-title", class: "small" }, "Snapshots"), el("label", { class: "search" }, el("span", { class: "hidden" }, "Filter"), this.box), this.status),
        el("p", { class: "muted help", id: "filter-help" }, "A part of a name, a glob, or a condition on step, age, size, tag, metrics and metadata. Press / to type here."),
        this.error, this.strip, this.drawChoices(), this.plot),
      this.lineage,
      el("section", { class: "card", "aria-label": "Table of snapshots" }, this.choice, this.table));
    this.grid = new Grid(this.table, {
      label: "Snapshots", columns: this.makeColumns(), sort: parameters.sort || "-created",
      read: (offset, limit, sort) => this.read(offset, limit, sort),
      open: (row) => go("snapshot", { name: row.name }),
      toggle: (row) => this.pick(row.name),
      onSort: (sort) => note({ sort }),
      seen: (rows) => this.wantSizes(rows),
      empty: "No snapshot to show here. Clear the filter, or save one: new snapshots appear by themselves.",
    });
    let timer = 0;
    this.box.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.refilter(), 150);
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
    document.addEventListener("themed", () => this.draw(), { signal });
  }

  async start() {
    this.drawPicked();
    await this.reload(true);
    this.grid.node.focus({ preventScroll: true });
  }

  async refilter() {
    this.filter = this.box.value;
    note({ filter: this.filter });
    this.drawMovement();
    await this.reload(true);
  }

  async reload(isFresh) {
    this.asked.clear();
    await Promise.all([this.readSeries(), this.grid.reload(isFresh)]);
  }

  async read(offset, limit, sort) {
    const found = await ask("snapshots", { filter: this.filter, sort, offset, limit }, this.signal);
    const metrics = found.metrics.slice(0, SHOWN_METRICS);
    if (metrics.join("\n") !== this.metrics.join("\n")) {
      this.metrics = metrics;
      this.grid.setColumns(this.makeColumns());
    }
    const broken = found.damaged.length ? [`; ${count(found.damaged.length)} damaged: see `, el("a", { href: address("health") }, "Health")] : [];
    this.status.replaceChildren(`${count(found.total)} ${found.total === 1 ? "snapshot" : "snapshots"}`, ...broken);
    return { total: found.total, rows: found.snapshots };
  }

  async readSeries() {
    try {
      this.series = await ask("series", { filter: this.filter }, this.signal);
      this.error.replaceChildren();
    } catch (error) {
      if (error.name === "AbortError") return;
      // The table shows the same error.
      this.series = null;
    }
    this.drawStrip();
    this.draw();
  }

  makeColumns() {
    const size = (name) => (row) => { const found = this.sizes.get(row.digest + row.generation); return !found ? "" : found.damage ? el("span", { class: "c-origin", title: clean(found.damage) }, "damaged") : bytes(found[name]); };
    const metrics = this.metrics.map((name, at) => ({ name: "number-" + name, title: clean(name), tip: clean(name), number: true, wide: [720, 860, 1280, 1280][at], sort: /^[A-Za-z_][\w.]*$/.test(name) ? name : null, width: "minmax(80px, 104px)", show: (row) => (name in row.numbers ? NOT_FINITE[row.numbers[name]] || short(numeral(row.numbers[name])) : "") }));
    return [
      { name: "pick", title: "", tip: "Chosen for a comparison", width: "36px", show: (row) => this.drawPick(row.name) },
      { name: "name", title: "Name", main: true, width: "minmax(230px, 3fr)", sort: "name", show: (row) => [el("a", { href: address("snapshot", { name: row.name }), tabindex: "-1" }, clean(row.name))] },
      { name: "saved", title: "Saved", width: "152px", wide: true, sort: "created", show: (row) => when(row.time_s) },
      { name: "step", title: "Step", number: true, width: "66px", sort: "step", show: (row) => (row.step === null ? "" : typeof row.step === "number" ? count(row.step) : clean(row.step)) },
      { name: "size", title: "Size", number: true, width: "80px", sort: "size", show: (row) => bytes(row.logical_bytes), tip: "the size of the values, without sharing" },
      { name: "new", title: "New", number: true, wide: true, width: "80px", show: size("new_bytes"), tip: "bytes that this save wrote" },
      { name: "reused", title: "Shared", number: true, wide: true, width: "80px", show: size("reused_bytes"), tip: "bytes that the store had already" },
      { name: "stored", title: "Stored", number: true, wide: 980, width: "80px", show: size("stored_bytes"), tip: "bytes in packs and manifests, each chunk counted once" },
      ...metrics,
      { name: "tags", title: "Tags", wide: true, width: "minmax(70px, 1fr)", show: (row) => row.tags.map((tag) => el("span", { class: "pill c-close" }, clean(tag))) },
      { name: "from", title: "Saved from", wide: 1380, width: "minmax(90px, 1.2fr)", tip: "what was loaded before, or the save before", show: (row) => clean(row.loaded[0] || row.previous || "") },
    ];
  }

  drawPick(name) {
    const box = el("input", { type: "checkbox", class: "pick", tabindex: "-1", "aria-label": "Compare " + clean(name) });
    box.checked = this.picked.includes(name);
    box.addEventListener("change", () => this.pick(name));
    return [box];
  }

  pick(name) {
    this.picked = this.picked.includes(name) ? this.picked.filter((each) => each !== name) : [...this.picked, name].slice(-2);
    this.drawPicked();
    this.grid.redraw();
  }

  drawPicked() {
    const [a, b] = this.picked;
    const hint = a === undefined ? "Choose two snapshots to compare them: click their boxes, or press Space." : "Choose one more.";
    this.choice.replaceChildren(...(b === undefined
      ? [el("span", { class: "muted" }, a === undefined ? "" : el("code", {}, clean(a)), " ", hint)]
      : [el("code", { class: "side-a" }, clean(a)), el("span", { class: "muted" }, "and"), el("code", { class: "side-b" }, clean(b)), el("a", { class: "button", id: "compare", href: address("compare", { a, b }) }, "Compare")]));
  }

  // Sizes need manifests, so they are read only for rows that are visible.
  async wantSizes(rows) {
    const wanted = rows.filter((row) => !this.sizes.has(row.digest + row.generation) && !this.asked.has(row.name)).slice(0, 40);
    if (!wanted.length || this.grid.isNarrow) return;
    for (const row of wanted) this.asked.add(row.name);
    try {
      const found = await ask("sizes", { name: wanted.map((row) => row.name) }, this.signal);
      for (const row of wanted) this.sizes.set(row.digest + row.generation, Object.hasOwn(found.sizes, row.name) ? found.sizes[row.name] : { damage: Object.hasOwn(found.damaged, row.name) ? found.damaged[row.name] : "" });
      this.grid.redraw();
    } catch (error) {
      if (error.name !== "AbortError" && error.kind !== "NotFound") showError(this.error, error);
    }
  }

  // To the movement of the layers over the snapshots that the filter finds.
  drawMovement() {
    this.movement.href = address("movement", { filter: this.filter });
    return this.movement;
  }

  drawChoices() {
    const choose = (by) => { this.by = by; note({ by }); this.draw(); draw(); };
    const buttons = { step: "By step", time: "By time" };
    const bar = el("div", { class: "bar" });
    const log = el("button", { type: "button", class: "quiet", id: "log", "aria-pressed": String(this.isLog), onclick: () => { this.isLog = !this.isLog; log.setAttribute("aria-pressed", String(this.isLog)); note({ log: this.isLog ? "true" : "" }); this.draw(); } }, "Logarithmic");
    const draw = () => bar.replaceChildren(...Object.entries(buttons).map(([by, title]) => el("button", { type: "button", class: "quiet", "data-by": by, "aria-pressed": String(this.by === by), onclick: () => choose(by) }, title)), log, el("span", { class: "spring" }), this.drawMovement());
    draw();
    return bar;
  }

  drawStrip() {
    const numbers = this.series ? this.series.numbers : {};
    const names = Object.keys(numbers);
    if (this.chosen !== SIZE && !names.includes(this.chosen)) this.chosen = names[0] || SIZE;
    const card = (name, title, values, shown) => el("button", { type: "button", class: "tile metric", "data-metric": name, title: `${title}: the newest value, and its course in up to 3 series`, "aria-pressed": String(this.chosen === name), onclick: () => this.plotNumber(name) },
      el("span", {}, title), el("strong", {}, shown), sparkline(this.split(values)));
    const last = (name) => {
      const bad = Object.hasOwn(this.series.not_finite, name) ? this.series.not_finite[name] : {}, at = numbers[name].findLastIndex((value, place) => value !== null || place in bad);
      return at in bad ? NOT_FINITE[bad[at]] || bad[at] : short(numbers[name][at]);
    };
    // Those that have no tile are in a list; the chosen one always has a tile.
    const shown = names.slice(0, MAX_TILES);
    if (this.chosen !== SIZE && !shown.includes(this.chosen)) shown.splice(-1, 1, this.chosen);
    const cards = shown.map((name) => card(name, clean(name), numbers[name], last(name)));
    const sizes = this.series ? this.series.logical_bytes : [];
    cards.push(card(SIZE, "size", sizes, sizes.length ? bytes(sizes.at(-1)) : ""));
    const rest = names.filter((name) => !shown.includes(name));
    if (rest.length) cards.push(el("select", { id: "more-numbers", "aria-label": "Plot another number", onchange: (event) => this.plotNumber(event.target.value) }, el("option", { value: "" }, `${count(rest.length)} more\u2026`), rest.map((name) => el("option", { value: name }, clean(name)))));
    this.strip.replaceChildren(...(this.series && this.series.names.length ? cards : []));
  }

  plotNumber(name) {
    this.chosen = name;
    note({ metric: name });
    this.drawStrip();
    this.draw();
    this.strip.querySelector("[aria-pressed=true]").focus();
  }

  // Returns the values of each series of names, such as those below run1/, the longest first.
  split(values) {
    const groups = new Map();
    values.forEach((value, at) => {
      const series = seriesOf(this.series.names[at]);
      if (!groups.has(series)) groups.set(series, []);
      if (value !== null) groups.get(series).push(value);
    });
    return [...groups.values()].sort((p, q) => q.length - p.length).slice(0, 3);
  }

  draw() {
    if (!this.series || !this.series.names.length || !this.plot.clientWidth) {
      this.plot.replaceChildren();
      this.lineage.hidden = true;
      return;
    }
    const found = this.series, isSize = this.chosen === SIZE;
    const values = isSize ? found.logical_bytes : found.numbers[this.chosen];
    const byTime = this.by === "time" || !found.step.some((step) => step !== null);
    const groups = new Map();
    values.forEach((y, at) => {
      const x = byTime ? found.time_s[at] : found.step[at];
      if (y === null || x === null) return;
      const name = found.names[at], series = seriesOf(name);
      if (!groups.has(series)) groups.set(series, []);
      groups.get(series).push({ x, y, name });
    });
    const series = [...groups].map(([name, points]) => ({ key: name, name: clean(name), points: points.sort((p, q) => p.x - q.x) }));
    series.sort((p, q) => q.points.length - p.points.length);
    const show = isSize ? bytes : short, xs = { xName: byTime ? "saved" : "step", xWidth: byTime ? 160 : 90, xLeast: byTime ? 60 : 1, showX: byTime ? when : count };
    drawLines(this.plot, {
      label: `${clean(this.chosen)} of ${count(values.length)} snapshots, over ${byTime ? "time" : "steps"}`,
      ...xs, yName: clean(this.chosen), isLog: this.isLog, yUnit: isSize ? findUnit(values) : 0, series: series.length > MAX_SERIES ? joinRest(series) : series, showY: show,
      describe: (point) => [clean(point.name), `${clean(this.chosen)} ${show(point.y)}`, byTime ? when(point.x) : "step " + count(point.x)],
      choose: (point) => go("snapshot", { name: point.name }),
      marks: isSize ? [] : Object.entries(found.not_finite[this.chosen] || {}).map(([at, text]) => ({ x: byTime ? found.time_s[at] : found.step[at], text: NOT_FINITE[text] || text, title: found.names[at] })).filter((mark) => mark.x !== null),
    });
    const styles = new Map(series.map((one, at) => [one.key, "p-" + Math.min(at, MAX_SERIES - 1)]));
    drawLineage(this.lineage, { ...xs, found, byTime, styles, state: this.lineageState });
  }
}

// The unit that sizes are shown in: ticks are multiples of a tenth of it.
function findUnit(sizes) {
  return 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, ...ends(sizes)) / 1000) / Math.log(1024)) + 1);
}

// Beyond a dozen series, single snapshots are drawn as one series of points.
function joinRest(series) {
  const rest = series.slice(MAX_SERIES - 1).flatMap((one) => one.points).sort((p, q) => p.x - q.x);
  return [...series.slice(0, MAX_SERIES - 1), { name: "others", points: rest }];
}
