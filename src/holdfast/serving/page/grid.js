// A table of any length: asks for the pages that are scrolled to, and keeps only visible rows in the document.
import { el } from "./elements.js";
import { showError } from "./errors.js";

const ROW = 30, SPARE = 6, PAGE = 100, WIDE = 720, EMPTY = 190;
let number = 0;

// spec: label, columns [{name, title, width, show(row), number, wide, main, tip, sort}] where `wide` is the least width of
// a table that shows the column, or true for the usual one, read(offset, limit, sort),
// open(row), toggle(row), sort, onSort(sort), seen(rows), empty, isFirst(row).
export class Grid {
  constructor(host, spec) {
    this.spec = spec;
    this.sort = spec.sort || "";
    this.id = "grid-" + number++;
    this.node = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": spec.label + "; arrow keys move, Enter opens" });
    this.head = el("div", { class: "head", role: "row" });
    this.body = el("div", { role: "rowgroup" });
    this.body.style.position = "relative";
    this.empty = el("p", { class: "none", hidden: true }, spec.empty || "Nothing to show.");
    this.node.append(this.head, this.body, this.empty);
    this.error = el("div");
    host.append(this.error, this.node);
    this.pool = [];
    this.reset();
    this.node.addEventListener("scroll", () => this.draw(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.move(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (!row || event.target.closest("a, input")) return;
      this.activate(Number(row.dataset.at), true);
    });
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
    this.active = 0;
  }

  // Reads everything again; keeps the place where the reader is.
  async reload(isFresh) {
    const top = this.node.scrollTop, active = this.active;
    this.reset();
    if (!isFresh) this.active = active;
    await this.read(isFresh ? 0 : Math.floor(top / ROW / PAGE));
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
      this.active = Math.max(0, Math.min(this.active, this.total - 1));
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
    if (!this.columns || fitting !== this.columns.length) this.setColumns(this.spec.columns);
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
    this.columns = columns.filter((column) => this.fits(column));
    this.template = this.columns.map((column) => (this.isNarrow && column.main ? "minmax(130px, 2fr)" : column.width)).join(" ");
    this.head.replaceChildren(...this.columns.map((column) => this.makeHead(column)));
    this.head.style.gridTemplateColumns = this.template;
    this.pool.forEach((row) => row.remove());
    this.pool = [];
    this.draw(true);
  }

  makeHead(column) {
    const field = column.sort;
    const order = this.sort === field ? "ascending" : this.sort === "-" + field ? "descending" : "none";
    const inside = field ? el("button", { type: "button", title: column.tip, "aria-label": column.title ? null : column.tip, onclick: () => this.sortBy(column) }, column.title) : el("span", { class: column.title ? "muted" : "hidden", title: column.tip }, column.title || column.tip);
    return el("div", { role: "columnheader", class: column.number ? "num" : null, "data-key": column.name, "aria-sort": field ? order : null }, inside);
  }

  sortBy(column) {
    const [first, second] = column.number ? ["-" + column.sort, column.sort] : [column.sort, "-" + column.sort];
    this.sort = this.sort === first ? second : this.sort === second ? "" : first;
    const focused = column.name;
    this.setColumns(this.spec.columns);
    this.head.querySelector(`[data-key="${CSS.escape(focused)}"] button`).focus();
    if (this.spec.onSort) this.spec.onSort(this.sort);
    this.reload(true);
  }

  draw(isForced) {
    if (!this.columns) return;
    const total = this.total || 0;
    if (isForced) {
      this.body.style.height = total * ROW + "px";
      // A short table is as high as its rows.
      const wanted = total * ROW + 52;
      const isShort = this.total !== null && wanted < Math.min(620, 0.7 * window.innerHeight);
      this.node.style.height = isShort ? (total ? wanted : EMPTY) + "px" : "";
      this.empty.hidden = this.total !== 0;
      this.node.setAttribute("aria-rowcount", String(total + 1));
      this.pool.forEach((row) => { row.dataset.at = ""; });
    }
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW) - SPARE);
    const last = Math.min(total, Math.ceil((this.node.scrollTop + this.node.clientHeight) / ROW) + SPARE);
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page++) if (this.total !== null) this.read(page);
    while (this.pool.length < last - first) this.pool.push(this.body.appendChild(this.makeRow()));
    const size = this.pool.length, seen = [];
    for (let at = first; at < first + size; at++) this.show(this.pool[at % size], at, at < last, seen);
    if (total) this.node.setAttribute("aria-activedescendant", this.id + "-" + this.active);
    else this.node.removeAttribute("aria-activedescendant");
    if (seen.length && this.spec.seen) this.spec.seen(seen);
  }

  makeRow() {
    const row = el("div", { class: "row", role: "row" });
    row.style.gridTemplateColumns = this.template;
    for (const column of this.columns) row.append(el("div", { role: "gridcell", class: [column.number ? "num" : "", column.main ? "mono name" : ""].join(" ").trim() || null }));
    return row;
  }

  show(node, at, isUsed, seen) {
    node.hidden = !isUsed;
    if (!isUsed) return;
    const row = this.at(at);
    if (row) seen.push(row);
    node.classList.toggle("on", at === this.active);
    node.setAttribute("aria-selected", String(at === this.active));
    if (node.dataset.at === String(at) && node.dataset.full === String(Boolean(row))) return;
    node.dataset.at = String(at);
    node.dataset.full = String(Boolean(row));
    node.id = this.id + "-" + at;
    node.setAttribute("aria-rowindex", String(at + 2));
    node.style.top = at * ROW + "px";
    this.columns.forEach((column, index) => {
      const cell = node.children[index];
      const shown = row ? column.show(row) : index ? "" : "\u2026";
      const parts = [shown].flat().filter((part) => part !== null && part !== undefined);
      // A name is isolated, because a narrow table shows its end, by the direction of the cell.
      cell.replaceChildren(...(column.main ? [el("bdi", {}, parts)] : parts));
      cell.title = row && !column.number ? cell.textContent : "";
    });
  }

  // Draws rows again whose content has changed, such as sizes that have arrived.
  redraw() {
    this.draw(true);
  }

  activate(at, isOpening) {
    if (!this.total) return;
    this.active = Math.max(0, Math.min(this.total - 1, at));
    const top = this.active * ROW;
    const space = this.node.clientHeight - this.head.offsetHeight - ROW;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    else if (top > this.node.scrollTop + space) this.node.scrollTop = top - space;
    this.draw();
    const row = this.at(this.active);
    if (isOpening && row) this.spec.open(row);
  }

  // Opens a row that may not have been read yet.
  async openAt(at) {
    if (!this.total) return;
    await this.read(Math.floor(Math.min(at, this.total - 1) / PAGE));
    this.activate(at, true);
  }

  move(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.target !== this.node || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter") this.activate(this.active, true);
    else if (event.key === " " && this.spec.toggle && this.at(this.active)) this.spec.toggle(this.at(this.active));
    else if (event.key in moves) this.activate(this.active + moves[event.key], false);
    else return;
    event.preventDefault();
  }
}
