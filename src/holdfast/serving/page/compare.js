// The view of two snapshots: what changed, as a map of layers and kinds, and as a table; measured while it is shown.
import { askLines } from "./api.js";
import { bytes, drawHeat, drawLogScale, drawMeanings, ends, logShare, progress, shaped } from "./charts.js";
import { clean, count, el, numeral, short } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { address, go, note } from "./router.js";
import { link } from "./snapshot.js";

const MEASURES = { relative_l2: "relative L2", max_abs: "largest difference", angle: "1 - cosine" };
const MISSING = "equal, not there, or of another shape";
const MAX_COLUMNS = 1000, MAX_KINDS = 200;
const COLLATOR = new Intl.Collator("en", { numeric: true });
const SIGNS = { added: "+", removed: "\u2212", changed: "~" };

export async function openCompare(main, parameters, signal) {
  const view = new CompareView(main, parameters, signal);
  if (parameters.a && parameters.b) view.start();
  return { close: () => view.grid && view.grid.close(), refresh: null };
}

class CompareView {
  constructor(main, parameters, signal) {
    Object.assign(this, { a: parameters.a || "", b: parameters.b || "", filter: parameters.filter || "", measure: Object.hasOwn(MEASURES, parameters.measure) ? parameters.measure : "relative_l2", group: parameters.group || "", signal });
    this.rows = [];
    this.order = [];
    this.head = null;
    this.error = el("div");
    this.done = el("div", { class: "bar", id: "progress", "aria-live": "polite" });
    this.counts = el("div", { class: "facts-row", id: "counts-row" });
    const boxes = ["a", "b"].map((side) => el("input", { id: "side-" + side, value: this[side], placeholder: "a snapshot or a tag", autocomplete: "off", spellcheck: "false" }));
    const form = el("form", { class: "bar filters" }, el("h1", { class: "small" }, "Compare"), el("label", { class: "side-a" }, "From ", boxes[0]), el("label", { class: "side-b" }, "to ", boxes[1]), el("button", { type: "submit" }, "Compare"),
      el("button", { type: "button", class: "quiet", id: "swap", onclick: () => go("compare", { a: boxes[1].value, b: boxes[0].value }) }, "Swap"));
    form.addEventListener("submit", (event) => { event.preventDefault(); go("compare", { a: boxes[0].value.trim(), b: boxes[1].value.trim() }); });
    const hint = this.a && this.b ? null : el("p", { class: "muted" }, "Type two names, or choose two snapshots in ", link("snapshots", {}, "the list"), ".");
    const series = this.b.slice(0, this.b.lastIndexOf("/") + 1);
    const more = series ? el("p", {}, el("a", { id: "series-movement", href: address("movement", { filter: series, series }) }, `How far each layer moves over ${clean(series)}`)) : null;
    main.append(el("section", { class: "card" }, form, hint, more, this.error, this.done, this.counts));
    if (!this.a || !this.b) {
      boxes[0].focus();
      return;
    }
    this.map = el("div", { id: "layers" });
    this.groups = el("select", { "aria-label": "Which layers", onchange: (event) => { this.group = event.target.value; note({ group: this.group }); this.drawMap(); } });
    const measures = el("select", { "aria-label": "Which measure", id: "measure", onchange: (event) => { this.measure = event.target.value; note({ measure: this.measure }); this.drawMap(); } }, Object.entries(MEASURES).map(([name, title]) => el("option", { value: name, selected: name === this.measure }, title)));
    this.scale = el("span", { class: "legend" });
    this.mapCard = el("section", { class: "card", "aria-labelledby": "layers-title", hidden: true }, el("div", { class: "bar" }, el("h2", { id: "layers-title" }, "Layers"), this.groups, measures, el("span", { class: "spring" }), this.scale),
      el("p", { class: "muted help" }, "Columns are layers, rows are the tensors of a layer. Click a cell, or press Enter on it, to see both tensors."), this.map);
    this.box = el("input", { type: "search", value: this.filter, placeholder: "Filter by name", autocomplete: "off", spellcheck: "false", "aria-label": "Filter by name" });
    this.status = el("span", { class: "muted", id: "shown", role: "status", "aria-live": "polite" });
    this.table = el("div");
    main.append(this.mapCard, el("section", { class: "card", "aria-labelledby": "changes-title" }, el("div", { class: "bar filters" }, el("h2", { id: "changes-title" }, "Changes"), el("label", { class: "search" }, this.box), this.status), this.table));
    this.grid = new Grid(this.table, {
      label: "Changes", sort: parameters.sort || "-relative_l2", columns: columns(),
      read: async (offset, limit) => ({ total: this.order.length, rows: this.order.slice(offset, offset + limit) }),
      open: (row) => this.open(row), onSort: (sort) => { note({ sort }); this.arrange(); },
      empty: "No change to show.",
    });
    let timer = 0;
    this.box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { this.filter = this.box.value; note({ filter: this.filter }); this.arrange(true); }, 120); });
    document.addEventListener("themed", () => this.drawMap(), { signal });
  }

  async start() {
    let next = 0;
    this.done.replaceChildren(el("span", { class: "muted" }, "Reading both manifests\u2026"));
    try {
      for await (const found of askLines("diff", { a: this.a, b: this.b, values: "true" }, this.signal)) {
        if (found.changes) this.rows.push(...found.changes.map(makeRow));
        else this.head = found;
        this.drawCounts();
        const now = performance.now();
        if (now < next) continue;
        this.update();
        // With many rows, drawing takes longer: a tenth of the time is left for it, and the page stays fluid.
        next = performance.now() + Math.max(400, 9 * (performance.now() - now));
      }
      this.update();
      this.drawCounts();
      this.grid.node.focus({ preventScroll: true });
    } catch (error) {
      if (error.name === "AbortError") return;
      this.done.replaceChildren();
      showError(this.error, error);
    }
  }

  update() {
    this.arrange();
    this.drawGroups();
    this.drawMap();
  }

  drawCounts() {
    const head = this.head;
    const fact = (name, value, more) => el("div", { class: "fact" }, el("span", { class: "muted" }, name), el("strong", {}, value), el("small", { class: "muted" }, more));
    this.counts.replaceChildren(fact("Changed", count(head.changed), "leaves differ"), fact("Added", count(head.added), "only in the second"), fact("Removed", count(head.removed), "only in the first"), fact("Equal", count(head.equal), bytes(head.equal_bytes)), fact("Shared", bytes(head.shared_bytes), "bytes in the same chunks"));
    this.done.replaceChildren(...(this.rows.length < head.total ? [progress(this.rows.length, head.total), el("span", { class: "muted" }, `${count(this.rows.length)} of ${count(head.total)} measured`)] : []));
    if (head.is_equal) this.done.replaceChildren(el("span", { class: "pill c-equal" }, "The snapshots are equal"));
  }

  arrange(isFresh) {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    this.order = this.rows.filter((row) => words.every((word) => row.lower.includes(word)));
    const field = this.grid.sort.replace(/^-/, ""), down = this.grid.sort.startsWith("-");
    if (field) this.order.sort((p, q) => compareBy(p[field], q[field], down));
    this.status.textContent = `${count(this.order.length)} of ${count(this.rows.length)}`;
    this.grid.reload(isFresh);
  }

  // Names such as model.layers.3.attn.weight: the first number is the layer, what follows is the kind.
  drawGroups() {
    const found = new Map();
    for (const row of this.rows) if (row.layer) found.set(row.layer.group, (found.get(row.layer.group) || 0) + 1);
    const names = [...found].filter(([, size]) => size > 1).sort((p, q) => q[1] - p[1]).map(([name]) => name);
    if (!names.includes(this.group)) this.group = names[0] || "";
    this.groups.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === this.group }, clean(name) || "(the tree)")));
    this.mapCard.hidden = !names.length;
  }

  drawMap() {
    const rows = this.rows.filter((row) => row.layer && row.layer.group === this.group && row[this.measure] !== null);
    if (!rows.length) {
      this.map.replaceChildren(el("p", { class: "muted" }, "No change of these layers can be measured."));
      return;
    }
    const layers = [...new Set(rows.map((row) => row.layer.number))].sort((p, q) => p - q);
    const kinds = [...new Set(rows.map((row) => row.layer.kind))].slice(0, MAX_KINDS);
    // Of very many layers, each column shows the one that changed most of several in a row.
    const width = Math.ceil(layers.length / MAX_COLUMNS);
    const columns = new Map(layers.map((layer, at) => [layer, Math.floor(at / width)]));
    const places = new Map();
    for (const row of rows) {
      const place = row.layer.kind + "\n" + columns.get(row.layer.number), known = places.get(place);
      if (!known || row[this.measure] > known[this.measure]) places.set(place, row);
    }
    const cell = (row, column) => places.get(kinds[row] + "\n" + column);
    const values = rows.filter((row) => !row.broken).map((row) => row[this.measure]).filter((value) => value > 0 && Number.isFinite(value));
    const [low, high] = ends(values);
    const shown = layers.filter((_, at) => at % width === 0);
    const cells = kinds.map((_, row) => shown.map((_, column) => { const found = cell(row, column); return !found ? null : found.broken ? NaN : found[this.measure]; }));
    drawHeat(this.map, {
      label: `${MEASURES[this.measure]} by layer and kind, from ${short(low)} to ${short(high)}`,
      cells, share: logShare(low, high), rowNames: kinds.map((kind) => clean(kind) || "(itself)"), columnNames: shown.map(String),
      describe: (row, column) => { const found = cell(row, column); return found ? [clean(found.name), `${MEASURES[this.measure]} ${showMeasure(found, found[this.measure])}`] : [`${clean(kinds[row])}, layer ${shown[column]}`, MISSING]; },
      choose: (row, column) => { const found = cell(row, column); if (found) this.open(found); },
    });
    const meanings = { ...(cells.some((line) => line.includes(null)) ? { none: MISSING } : {}), ...(rows.some((row) => row.broken) ? { bad: "NaN or infinite in one of the two" } : {}) };
    this.scale.replaceChildren(...drawMeanings(meanings), ...(values.length ? [drawLogScale(low, high)] : []));
  }

  open(row) {
    if (!row.isTensor) return;
    if (row.kind === "changed") go("tensor", { name: this.a, leaf: row.name, other: this.b });
    else go("tensor", { name: row.kind === "added" ? this.b : this.a, leaf: row.name });
  }
}

function makeRow(change) {
  const facts = change.after || change.before, far = change.distances[0];
  const number = (value) => (value === null || value === undefined ? null : numeral(value));
  const cosine = far ? number(far.cosine) : null, broken = findBroken(far);
  // Distances are over finite values: for a tensor that became NaN, they would be those of what is left.
  const measured = (value) => (broken && value !== null ? Infinity : value);
  const what = facts.dtype ? `${facts.dtype} ${shaped(facts.shape || [])}` : facts.text || facts.kind;
  return {
    name: change.name, lower: change.name.toLowerCase(), kind: change.kind, what, how: [describe(change), ...countBad(far)].join(", "), isTensor: Boolean(facts.dtype && facts.shape),
    broken, relative_l2: far ? measured(number(far.relative_l2)) : null, max_abs: far ? measured(number(far.max_abs)) : null, cosine, angle: broken ? Infinity : cosine === null ? null : 1 - cosine,
    share: far && far.total ? far.mismatches / far.total : null, layer: findLayer(change.name),
  };
}

// Returns what the values of one side are and those of the other are not: NaN or Inf.
function findBroken(far) {
  if (!far) return "";
  return far.nan[0] !== far.nan[1] ? "NaN" : far.inf[0] !== far.inf[1] ? "Inf" : "";
}

function showMeasure(row, value) {
  return row.broken ? row.broken : short(value);
}

// How many values are not finite, before and after; as `holdfast diff` prints it.
function countBad(far) {
  const both = far ? [["NaN", far.nan], ["Inf", far.inf]] : [];
  return both.filter(([, found]) => found[0] || found[1]).map(([name, found]) => `${name} ${found.map(count).join(" \u2192 ")}`);
}

function findLayer(name) {
  const keys = name.split("."), at = keys.findIndex((key) => /^\d{1,6}$/.test(key));
  return at < 0 ? null : { group: keys.slice(0, at).join("."), number: Number(keys[at]), kind: keys.slice(at + 1).join(".") };
}

function describe(change) {
  if (change.kind !== "changed") return change.kind;
  return change.aspects.map((aspect) => (aspect.before || aspect.after ? `${aspect.what === "value" ? "" : aspect.what + " "}${aspect.before} \u2192 ${aspect.after}` : aspect.what)).join(", ");
}

function compareBy(p, q, down) {
  if (typeof p === "string") return (down ? -1 : 1) * COLLATOR.compare(p, q);
  const isKnown = (value) => value !== null && !Number.isNaN(value);
  if (!isKnown(p) || !isKnown(q)) return Number(isKnown(q)) - Number(isKnown(p));
  return down ? q - p : p - q;
}

function columns() {
  const near = (value) => (value === null ? "" : Math.abs(1 - value) < 1e-4 && value !== 1 ? "1 - " + (1 - value).toExponential(1) : String(Number(value.toFixed(5))));
  return [
    { name: "kind", title: "", tip: "Added, removed or changed", width: "40px", sort: "kind", show: (row) => el("span", { class: "sign-" + row.kind, title: row.kind }, SIGNS[row.kind]) },
    { name: "name", title: "Name", main: true, width: "minmax(220px, 3fr)", sort: "name", show: (row) => clean(row.name) || "(the tree)" },
    { name: "what", title: "What", wide: true, width: "minmax(130px, 1.4fr)", sort: "what", show: (row) => clean(row.what) },
    { name: "how", title: "Differs in", wide: true, width: "minmax(110px, 1.2fr)", show: (row) => clean(row.how) },
    { name: "relative_l2", title: "Rel. L2", number: true, width: "84px", sort: "relative_l2", tip: "|a - b| / |a|; inf if a is zero; NaN or Inf if one of the two has such values", show: (row) => showMeasure(row, row.relative_l2) },
    { name: "max_abs", title: "Max |d|", number: true, wide: 560, width: "84px", sort: "max_abs", tip: "the largest difference of two values", show: (row) => showMeasure(row, row.max_abs) },
    { name: "cosine", title: "Cosine", number: true, wide: true, width: "96px", sort: "angle", tip: "cosine similarity", show: (row) => (row.broken ? row.broken : near(row.cosine)) },
    { name: "share", title: "Differ", number: true, wide: true, width: "76px", sort: "share", tip: "share of values that differ", show: (row) => (row.share === null ? "" : Number((100 * row.share).toPrecision(3)) + " %") },
  ];
}
