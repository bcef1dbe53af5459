// A table of any length: asks for the pages that are scrolled to, and keeps only visible rows in the document.
import { el } from "./elements.js";
import { showError } from "./errors.js";
import { LongTable } from "./rows.js";

const PAGE = 100, WIDE = 720, EMPTY = 190;
let number = 0;

// spec: label, columns of `LongTable` that may have `wide`, the least width of a table that shows the column, or true for
// the usual one, read(offset, limit, sort), open(row), toggle(row), sort, onSort(sort), seen(rows), empty.
export class Grid {
  constructor(host, spec) {
    this.spec = spec;
    this.sort = spec.sort || "";
    const id = "grid-" + number++;
    this.node = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": spec.label + "; arrow keys move, Enter opens" });
    this.table = new LongTable(this.node, {
      empty: spec.empty || "Nothing to show.", draw: () => this.draw(), row: (at) => this.at(at), id: (at) => id + "-" + at,
      open: (row) => spec.open(row), toggle: spec.toggle && ((row) => spec.toggle(row)),
    });
    this.error = el("div");
    host.append(this.error, this.node);
    this.reset();
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.node);
  }

  close() {
    this.sizes.disconnect();
    this.version = -1;
  }

  reset() {
    this.version = (this.version || 0) + 1;
    this.pages = new Map();
    this.total = null;
    this.table.active = 0;
  }

  // Reads everything again; keeps the place where the reader is.
  async reload(isFresh) {
    const { active, sight } = this.table;
    this.reset();
    if (!isFresh) this.table.active = active;
    await this.read(isFresh ? 0 : Math.floor(sight[0] / PAGE));
    if (isFresh) this.node.scrollTop = 0;
    this.draw(true);
  }

  async read(page) {
    if (this.pages.has(page)) return;
    const version = this.version;
    this.pages.set(page, []);
    try {
      const found = await this.spec.read(page * PAGE, PAGE, this.sort);
      if (version !== this.version) return;
      this.error.replaceChildren();
      this.node.hidden = false;
      this.pages.set(page, found.rows);
      this.total = found.total;
      this.table.active = Math.max(0, Math.min(this.table.active, this.total - 1));
      this.draw(true);
    } catch (error) {
      if (version !== this.version) return;
      this.pages.delete(page);
      if (error.name === "AbortError") return;
      showError(this.error, error);
      // The rows before are not those that were asked for.
      if (this.total === null) this.node.hidden = true;
    }
  }

  at(index) {
    const page = this.pages.get(Math.floor(index / PAGE));
    return page ? page[index % PAGE] : undefined;
  }

  resize() {
    const fitting = this.spec.columns.filter((column) => this.fits(column)).length;
    if (!this.table.columns || fitting !== this.table.columns.length) this.setColumns(this.spec.columns);
    this.draw();
  }

  get isNarrow() {
    return this.node.clientWidth < WIDE;
  }

  fits(column) {
    return this.node.clientWidth >= (column.wide === true ? WIDE : column.wide || 0);
  }

  setColumns(columns) {
    this.spec.columns = columns;
    const fitting = columns.filter((column) => this.fits(column));
    const template = fitting.map((column) => (this.isNarrow && column.main ? "minmax(130px, 2fr)" : column.width)).join(" ");
    const order = ({ sort }) => (this.sort === sort ? "ascending" : this.sort === "-" + sort ? "descending" : "none");
    this.table.setColumns(fitting, template, order, (column) => this.sortBy(column));
    this.draw(true);
  }

  sortBy(column) {
    const [first, second] = column.number ? ["-" + column.sort, column.sort] : [column.sort, "-" + column.sort];
    this.sort = this.sort === first ? second : this.sort === second ? "" : first;
    const focused = column.name;
    this.setColumns(this.spec.columns);
    this.table.head.querySelector(`[data-key="${CSS.escape(focused)}"] button`).focus();
    if (this.spec.onSort) this.spec.onSort(this.sort);
    this.reload(true);
  }

  draw(isForced) {
    // Rows may arrive before the observer of sizes has told how many columns fit.
    if (!this.table.columns) return this.resize();
    if (isForced) {
      this.table.setSize(this.total || 0);
      // A short table is as high as its rows.
      const wanted = this.table.height + 52;
      const isShort = this.total !== null && wanted < Math.min(620, 0.7 * window.innerHeight);
      this.node.style.height = isShort ? (this.total ? wanted : EMPTY) + "px" : "";
      this.table.empty.hidden = this.total !== 0;
    }
    const [first, last] = this.table.sight;
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page++) if (this.total !== null) this.read(page);
    const seen = this.table.draw();
    if (seen.length && this.spec.seen) this.spec.seen(seen);
  }

  // Draws rows again whose content has changed, such as sizes that have arrived.
  redraw() {
    this.draw(true);
  }

  // Opens a row that may not have been read yet.
  async openAt(at) {
    if (!this.total) return;
    await this.read(Math.floor(Math.min(at, this.total - 1) / PAGE));
    this.table.activate(at, true);
  }
}
