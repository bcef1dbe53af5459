// The view of one snapshot: its facts, its parts, and its leaves with repeated layers folded.
import { ask } from "./api.js";
import { bytes, when } from "./charts.js";
import { clean, count, el, numeral, short } from "./elements.js";
import { Grid } from "./grid.js";
import { drawRanks, shortCut } from "./ranks.js";
import { address, go, note } from "./router.js";

export async function openSnapshot(main, parameters, signal) {
  const found = await ask("snapshot", { name: parameters.name }, signal);
  const grids = drawLeaves(main, found, parameters, signal);
  // The leaves of a snapshot never change; its tags, and what was saved from it, do.
  const refresh = async () => {
    const again = await ask("snapshot", { name: parameters.name }, signal);
    if (again.digest !== found.digest) window.dispatchEvent(new HashChangeEvent("hashchange"));
    else [drawHead(again), drawAbout(again)].forEach((section) => main.querySelector("#" + section.id).replaceWith(section));
  };
  return { close: () => grids.forEach((grid) => grid.close()), refresh };
}

export function link(view, parameters, text) {
  return el("a", { href: address(view, parameters), class: "name" }, clean(text));
}

export function pairs(rows) {
  const body = el("tbody");
  for (const [name, value] of rows) if (value !== "" && value !== null && value !== undefined) body.append(el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)));
  return el("table", {}, body);
}

function drawHead(found) {
  const before = found.loaded[0] || found.previous;
  return el("section", { class: "card", id: "about" },
    el("p", { class: "muted crumbs" }, link("snapshots", {}, "Snapshots"), " \u203a"),
    el("div", { class: "bar" }, el("h1", { class: "mono name" }, clean(found.name)), found.tags.map((tag) => el("span", { class: "pill c-close" }, clean(tag))), el("span", { class: "spring" }),
      before ? el("a", { class: "button", id: "compare", href: address("compare", { a: before, b: found.name }) }, "Compare with " + clean(before)) : null),
    el("div", { class: "facts-row" },
      fact("Size", bytes(found.logical_bytes), count(found.logical_bytes) + " bytes"),
      fact("New", bytes(found.new_bytes), "written by this save"),
      fact("Shared", bytes(found.reused_bytes), "in the store before"),
      fact("Stored", bytes(found.stored_bytes), "in packs and manifests"),
      fact("Values", amount(found.items), `in ${count(found.leaves)} ${found.leaves === 1 ? "leaf" : "leaves"}`),
      found.ranks ? fact("Ranks", count(found.ranks), "saved it together") : null));
}

export function fact(name, value, more) {
  return el("div", { class: "fact" }, el("span", { class: "muted" }, name), el("strong", {}, value), el("small", { class: "muted" }, more));
}

export function amount(number) {
  for (const [size, unit] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e4, " k"]]) if (number >= size) return Number((number / (size === 1e4 ? 1e3 : size)).toPrecision(3)) + unit;
  return count(number);
}

function drawAbout(found) {
  const rows = [
    ["Saved", when(found.time_s)],
    ["Step", found.step === null ? "" : typeof found.step === "number" ? count(found.step) : clean(found.step)],
    ["Digest", el("code", {}, found.digest)],
    ["Loaded", found.loaded.length ? found.loaded.flatMap((name, at) => [at ? ", " : null, link("snapshot", { name }, name)]) : ""],
    ["Saved after", found.previous ? link("snapshot", { name: found.previous }, found.previous) : ""],
    ["Continued by", found.children.length ? found.children.slice(0, 6).flatMap((name, at) => [at ? ", " : null, link("snapshot", { name }, name)]) : ""],
    ...Object.entries(found.numbers).map(([name, value]) => [clean(name), value === "nan" ? "NaN" : short(numeral(value))]),
    ...Object.entries(found.metadata).filter(([name]) => name !== "metrics" && !Object.hasOwn(found.numbers, name)).map(([name, value]) => [clean(name), text(value)]),
    ...Object.entries(found.environment).filter(([name]) => name !== "lineage").map(([name, value]) => [clean(name.replaceAll("_", " ")), text(value)]),
  ];
  return el("section", { class: "card", id: "facts", "aria-label": "Facts" }, el("h2", {}, "Facts"), el("div", { class: "facts", tabindex: "0", role: "group", "aria-label": "List of facts" }, pairs(rows)));
}

function text(value) {
  return el("span", { class: "name" }, clean(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 2000));
}

function drawParts(found) {
  const most = Math.max(1, ...found.parts.map((part) => part.bytes));
  const rows = found.parts.map((part) => {
    const bar = el("i", { class: "share" });
    bar.style.width = (100 * part.bytes) / most + "%";
    return el("tr", {}, el("th", { scope: "row", class: "mono name" }, clean(part.name) || "(the tree)"), el("td", { class: "num" }, count(part.leaves)), el("td", { class: "num" }, part.items ? amount(part.items) : ""), el("td", { class: "num" }, part.bytes ? bytes(part.bytes) : ""), el("td", { class: "share-cell" }, bar));
  });
  const head = el("thead", {}, el("tr", {}, ["Part", "Leaves", "Values", "Size", ""].map((title, at) => el(title ? "th" : "td", { scope: title ? "col" : null, class: at ? "num" : null }, title))));
  return el("section", { class: "card", "aria-label": "Parts" }, el("h2", {}, "Parts"), el("div", { class: "facts", tabindex: "0", role: "group", "aria-label": "Table of parts" }, el("table", {}, head, el("tbody", {}, rows))));
}

function drawLeaves(main, found, parameters, signal) {
  const fold = parameters.fold || "";
  const state = { filter: parameters.filter || "", folded: !fold && parameters.folded !== "false" };
  const box = el("input", { type: "search", value: state.filter, placeholder: "Filter by name, or a glob such as *.weight", autocomplete: "off", spellcheck: "false" });
  const toggle = el("input", { type: "checkbox", id: "folded" });
  toggle.checked = state.folded;
  const status = el("span", { class: "muted", id: "shown", role: "status", "aria-live": "polite" });
  const table = el("div");
  const back = fold ? el("p", { class: "crumbs" }, link("snapshot", { name: found.name }, "All leaves"), " \u203a ", el("code", {}, clean(fold))) : null;
  const ranks = found.ranks && !fold ? drawRanks(found, parameters, signal) : null;
  main.append(drawHead(found), el("div", { class: "pair" }, drawParts(found), drawAbout(found)), ranks ? ranks.card : "",
    el("section", { class: "card", "aria-labelledby": "leaves-title" },
      el("div", { class: "bar filters" }, el("h2", { id: "leaves-title" }, "Leaves"), el("label", { class: "search" }, el("span", { class: "hidden" }, "Filter"), box), fold ? null : el("label", { class: "check" }, toggle, " Fold repeated layers"), status),
      back, table));
  const grid = new Grid(table, {
    label: "Leaves", sort: parameters.sort || "", columns: leafColumns(found),
    read: async (offset, limit, sort) => {
      const page = await ask("leaves", { name: found.name, fold, filter: state.filter, folded: state.folded ? "true" : "", sort, offset, limit }, signal);
      status.textContent = state.folded ? `${count(page.total)} ${page.total === 1 ? "line" : "lines"} for ${count(page.leaves)} ${page.leaves === 1 ? "leaf" : "leaves"}` : `${count(page.total)} of ${count(page.leaves)} ${page.leaves === 1 ? "leaf" : "leaves"}`;
      return { total: page.total, rows: page.lines.map((line) => ({ ...line, cut: shortCut(page.cuts && page.cuts[line.first]) })) };
    },
    open: (line) => openLine(found, line),
    onSort: (sort) => note({ sort }),
    empty: "No leaf matches. Clear the filter to see all.",
  });
  let timer = 0;
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.filter = box.value; note({ filter: box.value }); grid.reload(true); }, 150);
  });
  toggle.addEventListener("change", () => { state.folded = toggle.checked; note({ folded: toggle.checked ? "" : "false" }); grid.reload(true); });
  grid.reload(true).then(() => grid.node.focus({ preventScroll: true }));
  return ranks ? [grid, ranks.grid] : [grid];
}

function leafColumns(found) {
  return [
    { name: "name", title: "Name", main: true, width: "minmax(240px, 3fr)", sort: "name", show: (line) => clean(line.name) || "(the tree)" },
    { name: "what", title: "What", width: "minmax(150px, 2fr)", sort: "dtype", show: (line) => clean(line.label) },
    { name: "items", title: "Values", number: true, wide: 560, width: "96px", sort: "items", show: (line) => (line.items ? amount(line.items) : "") },
    { name: "bytes", title: "Size", number: true, width: "96px", wide: true, sort: "bytes", show: (line) => (line.bytes ? bytes(line.bytes) : "") },
    ...(found.ranks ? [{ name: "ranks", title: "Stored by", width: "110px", wide: true, sort: "ranks", tip: "how many ranks stored a part of it", show: (line) => (line.ranks ? `${line.ranks} of ${found.ranks} ranks` : "") },
      { name: "cut", title: "Cut", width: "minmax(90px, 150px)", wide: 860, tip: "as the boxes look that ranks stored", show: (line) => line.cut }] : []),
  ];
}

function openLine(found, line) {
  if (line.count > 1) go("snapshot", { name: found.name, fold: line.name });
  else if (line.dtype !== null && line.shape !== null) go("tensor", { name: found.name, leaf: line.first });
}
