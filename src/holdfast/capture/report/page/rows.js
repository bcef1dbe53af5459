// A table of any length: only the rows in sight are in the document. Shared by the report and by the page of `holdfast serve`.
import { el } from "./elements.js";

const ROW = 30, SPARE = 6;

// columns: [{name, title, width, show(row), number, main, tip, sort}]; `main` is the column of names, `sort` what a click sorts by.
// spec: empty, draw(), row(at), which is undefined while it is not known, id(at), open(row); and may have toggle(row), mark(node, row), follows(): whether
// moving to a row opens it.
export class LongTable {
  constructor(node, spec) {
    Object.assign(this, { node, spec, size: 0, active: 0, pool: [], columns: null });
    this.head = el("div", { class: "head", role: "row" });
    this.body = el("div", { role: "rowgroup" });
    this.body.style.position = "relative";
    this.empty = el("p", { class: "none", hidden: true }, spec.empty);
    node.append(this.head, this.body, this.empty);
    node.addEventListener("scroll", () => spec.draw(), { passive: true });
    node.addEventListener("keydown", (event) => this.move(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row && !event.target.closest("a, input")) this.activate(Number(row.dataset.at), true);
    });
  }

  // order(column): how the table is sorted by it, for aria-sort.
  setColumns(columns, template, order, sortBy) {
    Object.assign(this, { columns, template });
    this.head.replaceChildren(...columns.map((column) => this.makeHead(column, order(column), sortBy)));
    this.head.style.gridTemplateColumns = template;
    this.pool.forEach((row) => row.remove());
    this.pool = [];
  }

  makeHead(column, order, sortBy) {
    const inside = column.sort ? el("button", { type: "button", title: column.tip, "aria-label": column.title ? null : column.tip, onclick: () => sortBy(column) }, column.title) : el("span", { class: column.title ? "muted" : "hidden", title: column.tip }, column.title || column.tip);
    return el("div", { role: "columnheader", class: column.number ? "num" : null, "data-key": column.name, "aria-sort": column.sort ? order : null }, inside);
  }

  // The lines in sight, and some before and after them.
  get sight() {
    const { scrollTop, clientHeight } = this.node;
    return [Math.max(0, Math.floor(scrollTop / ROW) - SPARE), Math.min(this.size, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE)];
  }

  // Says how many rows there are; all of them may have changed.
  setSize(size) {
    this.size = size;
    this.height = size * ROW;
    this.body.style.height = this.height + "px";
    this.node.setAttribute("aria-rowcount", String(size + 1));
    this.pool.forEach((row) => { row.dataset.at = ""; });
  }

  scrollTo(at) {
    this.node.scrollTop = at * ROW;
  }

  // Draws the lines in sight that have changed; returns the rows in sight that are known.
  draw() {
    const [first, last] = this.sight;
    while (this.pool.length < last - first) this.pool.push(this.body.appendChild(this.makeRow()));
    // A row of the pool shows every n-th line, so that scrolling by one line changes one row.
    const size = this.pool.length, seen = [];
    for (let at = first; at < first + size; at++) this.show(this.pool[at % size], at, at < last, seen);
    if (this.size) this.node.setAttribute("aria-activedescendant", this.spec.id(this.active));
    else this.node.removeAttribute("aria-activedescendant");
    return seen;
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
    const row = this.spec.row(at), isKnown = row !== undefined;
    if (isKnown) seen.push(row);
    node.classList.toggle("on", at === this.active);
    node.setAttribute("aria-selected", String(at === this.active));
    if (node.dataset.at === String(at) && node.dataset.full === String(isKnown)) return;
    node.dataset.at = String(at);
    node.dataset.full = String(isKnown);
    node.id = this.spec.id(at);
    node.setAttribute("aria-rowindex", String(at + 2));
    node.style.top = at * ROW + "px";
    if (this.spec.mark) this.spec.mark(node, row);
    this.columns.forEach((column, index) => {
      const cell = node.children[index];
      const shown = isKnown ? column.show(row) : index ? "" : "\u2026";
      const parts = [shown].flat().filter((part) => part !== null && part !== undefined);
      // A name is isolated, because a narrow table shows its end, by the direction of the cell.
      cell.replaceChildren(...(column.main ? [el("bdi", {}, parts)] : parts));
      cell.title = isKnown && !column.number ? cell.textContent : "";
    });
  }

  activate(at, isOpening) {
    if (!this.size) return;
    this.active = Math.max(0, Math.min(this.size - 1, at));
    const top = this.active * ROW;
    const space = this.node.clientHeight - this.head.offsetHeight - ROW;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    else if (top > this.node.scrollTop + space) this.node.scrollTop = top - space;
    this.spec.draw();
    const row = this.spec.row(this.active);
    if (row !== undefined && (isOpening || (this.spec.follows && this.spec.follows()))) this.spec.open(row);
  }

  move(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.target !== this.node || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter") this.activate(this.active, true);
    else if (event.key === " " && this.spec.toggle && this.spec.row(this.active) !== undefined) this.spec.toggle(this.spec.row(this.active));
    else if (event.key in moves) this.activate(this.active + moves[event.key], false);
    else return;
    event.preventDefault();
  }
}
