// Which snapshots share bytes with which: a map of up to 64 at a time, and for one of them, a table of all others.
import { ask } from "./api.js";
import { bytes, drawHeat, drawScale } from "./charts.js";
import { clean, count, el } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { go, note } from "./router.js";

const WINDOW = 64;

export function drawPairs(parameters, signal) {
  const view = new PairsView(parameters, signal);
  return { card: view.card, close: () => view.grid.close(), reload: () => view.reload() };
}

class PairsView {
  constructor(parameters, signal) {
    Object.assign(this, { signal, chosen: parameters.with || "", offset: Math.max(0, Number(parameters.from) || 0), found: null });
    this.filter = parameters.pairs || "";
    this.box = el("input", { type: "search", id: "pairs-filter", value: this.filter, placeholder: "run1/   run*/step-?00   step > 400", autocomplete: "off", spellcheck: "false", "aria-label": "Which snapshots" });
    this.status = el("span", { class: "muted", id: "pairs-shown", role: "status", "aria-live": "polite" });
    this.scale = el("span");
    this.map = el("div", { id: "pairs" });
    this.error = el("div");
    this.turn = [-1, 1].map((step) => el("button", { type: "button", class: "quiet", "data-turn": String(step), onclick: () => this.move(step) }, step < 0 ? "Earlier" : "Later"));
    this.head = el("p", { id: "shares-head", class: "muted" }, "Choose a snapshot in the map: click it, or press Enter on a cell.");
    this.table = el("div", { hidden: true });
    this.card = el("section", { class: "card", "aria-labelledby": "pairs-title" },
      el("div", { class: "bar filters" }, el("h2", { id: "pairs-title" }, "Bytes that two snapshots share"), el("label", { class: "search" }, this.box), this.turn, this.status, el("span", { class: "spring" }), this.scale),
      el("p", { class: "muted help" }, "The diagonal shows all that a snapshot uses in packs."), this.error, this.map, el("h3", {}, "Shares with"), this.head, this.table);
    this.grid = new Grid(this.table, {
      label: "Snapshots that share bytes with the chosen one", sort: "-shared_bytes", columns: columns(),
      read: (offset, limit, sort) => this.readShares(offset, limit, sort),
      open: (row) => go("compare", { a: this.chosen, b: row.name }), empty: "No other snapshot uses any of its bytes.",
    });
    let timer = 0;
    this.box.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => { this.filter = this.box.value; this.offset = 0; note({ pairs: this.filter, from: "" }); this.read(); }, 200);
    });
    document.addEventListener("themed", () => this.draw(), { signal });
  }

  async reload() {
    await this.read();
    if (this.chosen) await this.choose(this.chosen);
  }

  move(step) {
    this.offset = Math.max(0, this.offset + step * WINDOW);
    note({ from: this.offset || "" });
    this.read();
  }

  async read() {
    try {
      this.found = await ask("pairs", { filter: this.filter, offset: this.offset, limit: WINDOW }, this.signal);
      this.error.replaceChildren();
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") showError(this.error, error);
    }
  }

  draw() {
    const found = this.found;
    if (!found) return;
    const last = found.offset + found.names.length;
    this.status.textContent = found.total > found.names.length ? `${count(found.offset + 1)} to ${count(last)} of ${count(found.total)} snapshots` : `${count(found.total)} ${found.total === 1 ? "snapshot" : "snapshots"}`;
    this.turn[0].hidden = this.turn[1].hidden = found.total <= WINDOW;
    this.turn[0].disabled = !found.offset;
    this.turn[1].disabled = last >= found.total;
    if (!found.names.length) {
      this.map.replaceChildren(el("p", { class: "muted" }, "No snapshot to show here. Clear the filter to see all."));
      return;
    }
    let most = 1;
    found.shared.forEach((line) => line.forEach((size) => { most = Math.max(most, size); }));
    const names = found.names.map(clean), start = commonStart(names);
    drawHeat(this.map, {
      label: `Bytes that each two of ${count(names.length)} snapshots share, up to ${bytes(most)}; the names begin with ${start}`, cells: found.shared,
      share: (size) => size / most, rowNames: names.map((name) => name.slice(start.length) || name), columnNames: names.map((name) => lastNumber(name)),
      describe: (row, column) => [row === column ? names[row] : `${names[row]} and ${names[column]}`, (row === column ? "uses " : "both use ") + bytes(found.shared[row][column])],
      choose: (row) => this.choose(found.names[row]),
    });
    this.scale.replaceChildren(drawScale(0, most, false, bytes));
  }

  async choose(name) {
    this.chosen = name;
    note({ with: name });
    this.table.hidden = false;
    await this.grid.reload(true);
  }

  async readShares(offset, limit, sort) {
    const page = await ask("shares", { name: this.chosen, sort, offset, limit }, this.signal);
    this.head.replaceChildren(el("a", { class: "mono name", href: "#/snapshot?name=" + encodeURIComponent(page.name) }, clean(page.name)), ` uses ${bytes(page.uses_bytes)} in packs; ${count(page.total)} other ${page.total === 1 ? "snapshot uses" : "snapshots use"} some of it, and ${bytes(page.own_bytes)} are its own, with its manifest. Enter compares.`);
    return { total: page.total, rows: page.snapshots.map((row) => ({ ...row, share: page.uses_bytes ? row.shared_bytes / page.uses_bytes : 0 })) };
  }
}

function columns() {
  return [
    { name: "name", title: "Name", main: true, width: "minmax(200px, 3fr)", sort: "name", show: (row) => clean(row.name) },
    { name: "shared", title: "Shared", number: true, width: "96px", sort: "shared_bytes", tip: "bytes in packs that both use", show: (row) => bytes(row.shared_bytes) },
    { name: "share", title: "Share", number: true, width: "76px", tip: "of what the chosen snapshot uses", show: (row) => Number((100 * row.share).toPrecision(3)) + " %" },
    { name: "stored", title: "Stored", number: true, wide: true, width: "96px", sort: "stored_bytes", tip: "all bytes that this other snapshot uses", show: (row) => bytes(row.stored_bytes) },
  ];
}

// The part of all names up to the last slash or dash that they have in common.
function commonStart(names) {
  let start = names[0];
  for (const name of names) while (!name.startsWith(start)) start = start.slice(0, -1);
  return names.length > 1 ? start.slice(0, Math.max(start.lastIndexOf("/"), start.lastIndexOf("-")) + 1) : "";
}

function lastNumber(name) {
  const found = /(\d+)\D*$/.exec(name);
  return found ? found[1] : "";
}
