// The view of one tensor, or of the same tensor in two snapshots: statistics, histogram, heat map, values by index.
import { ask, askLines } from "./api.js";
import { bytes, drawHeat, drawMeanings, drawScale, progress, shaped } from "./charts.js";
import { clean, count, el, exact, numeral, short } from "./elements.js";
import { showError } from "./errors.js";
import { drawHistogram } from "./histogram.js";
import { drawPieces } from "./ranks.js";
import { address, note } from "./router.js";
import { amount, link } from "./snapshot.js";

const LINES = [["Minimum", "min"], ["Maximum", "max"], ["Mean", "mean"], ["Standard deviation", "std"], ["Norm", "norm"], ["Zeros", "zero"], ["NaN", "nan"], ["Infinite", "inf"]];

export async function openTensor(main, parameters, signal) {
  const view = new TensorView(main, parameters, signal);
  view.start();
  return { close: () => view.pieces && view.pieces.close(), refresh: null };
}

// Integers with all digits, other numbers with four.
function raw(value) {
  return Number.isSafeInteger(value) ? count(value) : short(value);
}

class TensorView {
  constructor(main, { name, leaf, other, index }, signal) {
    Object.assign(this, { name, leaf, other: other || "", signal, index: index || "", isLog: false });
    this.found = [null, null];
    this.heat = null;
    this.facts = el("p", { class: "muted", id: "facts-line" });
    this.done = el("div", { class: "bar", id: "progress", "aria-live": "polite" });
    this.stats = el("div", { id: "stats" });
    this.histogram = el("div", { class: "chart plot", id: "histogram" });
    this.error = el("div");
    this.map = el("div", { id: "heat" });
    this.scale = el("span", { class: "legend" });
    this.values = el("div", { id: "values", class: "facts", tabindex: "0", role: "group", "aria-label": "Values by index" });
    this.box = el("input", { id: "index", value: this.index, placeholder: ":, :", autocomplete: "off", spellcheck: "false", "aria-describedby": "index-help" });
    this.mapError = el("div");
    const log = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => { this.isLog = !this.isLog; log.setAttribute("aria-pressed", String(this.isLog)); this.draw(); } }, "Logarithmic");
    const form = el("form", { class: "bar" }, el("label", {}, "Index ", this.box), el("button", { type: "submit" }, "Show"), el("button", { type: "button", class: "quiet", id: "whole", onclick: () => this.zoom("") }, "Whole"), el("span", { class: "spring" }), this.scale);
    form.addEventListener("submit", (event) => { event.preventDefault(); this.zoom(this.box.value); });
    main.append(
      el("section", { class: "card" }, el("p", { class: "muted crumbs" }, link("snapshots", {}, "Snapshots"), " \u203a ", link("snapshot", { name }, name), " \u203a"), el("h1", { class: "mono name" }, clean(leaf)), this.facts,
        this.other ? el("p", {}, "Compared with ", el("span", { class: "side-b" }, link("snapshot", { name: this.other }, this.other)), " \u00b7 ", el("a", { href: address("tensor", { name, leaf }) }, "Only this one")) : null),
      el("div", { class: "pair" },
        el("section", { class: "card", "aria-labelledby": "stats-title" }, el("h2", { id: "stats-title" }, "Statistics"), this.done, this.error, this.stats),
        el("section", { class: "card", "aria-labelledby": "histogram-title" }, el("div", { class: "bar" }, el("h2", { id: "histogram-title" }, "Histogram"), el("span", { class: "spring" }), log), this.histogram)),
      el("section", { class: "card", "aria-labelledby": "slice-title" }, el("h2", { id: "slice-title" }, "A slice"),
        el("p", { class: "muted help", id: "index-help" }, "A number or a range for each dim, such as 3, 0:64. Click the map, or press Enter on a cell, to look closer."), form, this.mapError,
        el("div", { class: "slice" }, this.map, el("div", {}, el("h3", {}, "Values"), this.values))));
    this.below = main;
    this.pieces = null;
    document.addEventListener("themed", () => this.drawHeat(), { signal });
  }

  async start() {
    const names = this.other ? [this.name, this.other] : [this.name];
    names.forEach((name, side) => this.readSummary(name, side));
    this.readSlice();
    this.pieces = await drawPieces(this.below, this, (index) => { this.zoom(index); this.box.scrollIntoView({ block: "center" }); }, this.signal);
  }

  async readSummary(name, side) {
    try {
      for await (const found of askLines("tensor", { name, leaf: this.leaf }, this.signal)) {
        this.found[side] = found;
        this.draw();
      }
    } catch (error) {
      if (error.name !== "AbortError") showError(this.error, error);
    }
  }

  draw() {
    const known = this.found.filter(Boolean), first = this.found[0] || known[0];
    const magnitudes = first.dtype.startsWith("complex") ? "; complex numbers are shown by their magnitudes" : "";
    this.facts.textContent = `${first.dtype} ${shaped(first.shape)}, ${amount(first.items)} ${first.items === 1 ? "value" : "values"}, ${bytes(first.bytes)}${magnitudes}`;
    const left = known.find((found) => found.done < found.items);
    this.done.replaceChildren(...(left ? [progress(left.done, left.items), el("span", { class: "muted" }, `${count(left.done)} of ${count(left.items)} values read`)] : []));
    const sides = this.other ? this.found : [this.found[0]];
    const head = this.other ? el("thead", {}, el("tr", {}, el("td"), el("th", { scope: "col", class: "side-a name" }, clean(this.name)), el("th", { scope: "col", class: "side-b name" }, clean(this.other)))) : null;
    const body = LINES.map(([title, name]) => el("tr", {}, el("th", { scope: "row" }, title), sides.map((side) => el("td", {}, side ? exact(numeral(side[name])) || "\u2013" : ""))));
    this.stats.replaceChildren(el("table", {}, head, el("tbody", {}, body)));
    const drawn = sides.map((side) => (side ? { low: side.histogram.low, high: side.histogram.high, histogram: side.histogram.counts } : null));
    if (drawn.some((side) => side && side.histogram.length)) drawHistogram(this.histogram, drawn, this.other ? [this.name, this.other] : [this.name], this.isLog);
    else this.histogram.replaceChildren(el("p", { class: "muted" }, first.items ? "No finite value." : "The tensor has no values."));
  }

  zoom(index) {
    this.index = index;
    this.box.value = index;
    note({ index });
    this.readSlice();
  }

  async readSlice() {
    try {
      this.heat = await ask("heat", { name: this.name, leaf: this.leaf, index: this.index }, this.signal);
      this.mapError.replaceChildren();
      if (!this.heat.cells.length) {
        this.map.replaceChildren(el("p", { class: "muted" }, "The tensor has no values."));
        return;
      }
      this.drawHeat();
      const corner = this.heat.index.map((part) => (Array.isArray(part) ? `${part[0]}:${Math.min(part[1], part[0] + 12)}` : String(part))).join(", ");
      this.drawValues(await ask("values", { name: this.name, leaf: this.leaf, index: corner }, this.signal), corner);
    } catch (error) {
      if (error.name === "AbortError") return;
      showError(this.mapError, error);
      this.map.replaceChildren();
      this.values.replaceChildren();
    }
  }

  drawHeat() {
    if (!this.heat || !this.heat.cells.length) return;
    const { cells, rows, columns } = this.heat;
    let most = 0;
    for (const line of cells) for (const cell of line) if (cell !== null) most = Math.max(most, Math.abs(cell));
    const span = (range, size, at) => { const step = (range[1] - range[0]) / size; return [range[0] + Math.floor(at * step), Math.max(range[0] + Math.floor(at * step) + 1, range[0] + Math.floor((at + 1) * step))]; };
    const place = (row, column) => [span(rows, cells.length, row), span(columns, cells[0].length, column)];
    const single = (range) => (range[1] - range[0] === 1 ? String(range[0]) : `${range[0]}:${range[1]}`);
    drawHeat(this.map, {
      label: `Heat map of ${clean(this.leaf)}, rows ${rows.join(" to ")}, columns ${columns.join(" to ")}; values from ${short(-most)} to ${short(most)}`,
      cells: cells.map((line) => line.map((cell) => cell ?? NaN)), share: (value) => (Number.isNaN(value) ? NaN : most ? value / most : 0),
      describe: (row, column) => { const [r, c] = place(row, column); const value = cells[row][column]; return [`[${single(r)}, ${single(c)}]`, value === null ? "not finite" : `${single(r).includes(":") || single(c).includes(":") ? "mean " : ""}${short(value)}`]; },
      choose: (row, column) => this.look(place(row, column)),
    });
    const isBad = cells.some((line) => line.includes(null));
    this.scale.replaceChildren(...drawMeanings(isBad ? { bad: "NaN or infinite" } : {}), ...(most ? [drawScale(-most, most, true)] : []));
    this.map.append(el("p", { class: "muted help" }, this.describeMap()));
    this.box.placeholder = this.heat.index.map((part) => (Array.isArray(part) ? ":" : String(part))).join(", ");
  }

  // What the rows and columns of the map are, and what a cell stands for.
  describeMap() {
    const { cells, rows, columns, index, stride } = this.heat, dims = index.flatMap((part, dim) => (Array.isArray(part) ? [dim] : []));
    if (!dims.length) return "One value.";
    const name = (dim, range) => `dim ${dim}, ${count(range[0])} to ${count(range[1] - 1)}`;
    const down = dims.length > 1 ? `Down: ${name(dims[0], rows)}. ` : "";
    const isMean = cells.length < rows[1] - rows[0] || cells[0].length < columns[1] - columns[0];
    return `${down}Across: ${name(dims.at(-1), columns)}.${isMean ? " A cell is the mean of several values." : ""}${stride > 1 ? ` Of the rows, each ${count(stride)}th is read.` : ""}`;
  }

  // Zooms to an eighth of the rows and columns around a cell.
  look([row, column]) {
    const around = (cell, range) => {
      const size = Math.max(8, Math.ceil((range[1] - range[0]) / 8));
      const start = Math.max(range[0], Math.min(range[1] - size, Math.round((cell[0] + cell[1] - size) / 2)));
      return `${start}:${Math.min(range[1], start + size)}`;
    };
    const ranges = this.heat.index.filter(Array.isArray).length;
    const wanted = ranges === 2 ? [around(row, this.heat.rows), around(column, this.heat.columns)] : [around(column, this.heat.columns)];
    this.zoom(this.heat.index.map((part) => (Array.isArray(part) ? wanted.shift() : String(part))).join(", "));
  }

  drawValues(found, corner) {
    const title = (value) => (typeof value === "number" && raw(value) !== String(value) ? String(value) : null);
    const wide = found.shape.length > 1 ? found.shape[1] : found.shape[0] || 1, rows = [];
    const ranges = found.index.filter(Array.isArray), first = ranges.at(-1) || [0, 1], down = ranges.length > 1 ? ranges.at(-2) : [0, 1];
    for (let start = 0; start < found.values.length; start += wide) rows.push(found.values.slice(start, start + wide));
    const head = el("thead", {}, el("tr", {}, el("td"), Array.from({ length: wide }, (_, at) => el("th", { scope: "col", class: "num" }, String(first[0] + at)))));
    const body = rows.map((line, at) => el("tr", {}, el("th", { scope: "row" }, ranges.length > 1 ? String(down[0] + at) : ""), line.map((value) => el("td", { class: "num", title: title(value) }, typeof value === "number" ? raw(value) : String(value)))));
    this.values.replaceChildren(el("p", { class: "muted mono" }, `[${corner}]`), el("table", { class: "mono" }, head, el("tbody", {}, body)));
  }
}
