// The view of the compile cache: entries, sizes, last use; and how one differs from the most similar other one.
import { ask } from "./api.js";
import { bytes, when } from "./charts.js";
import { clean, count, el, short } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { note } from "./router.js";
import { fact } from "./snapshot.js";

export async function openCache(main, parameters, signal) {
  const table = el("div"), why = el("div", { id: "why", "aria-live": "polite" });
  const facts = el("div", { class: "facts-row" });
  main.append(
    el("section", { class: "card" }, el("h1", { class: "small" }, "Compile cache"), facts),
    el("section", { class: "card", "aria-labelledby": "cache-title" }, el("h2", { id: "cache-title" }, "Entries"), el("p", { class: "muted help" }, "Enter, or a click, shows why an entry was compiled although others were stored."), table),
    el("section", { class: "card", "aria-labelledby": "why-title" }, el("h2", { id: "why-title" }, "Why it was a miss"), why));
  const explain = async (key) => {
    note({ key });
    why.replaceChildren(el("p", { class: "muted" }, "Reading\u2026"));
    try {
      const { lines } = await ask("miss", { key }, signal);
      why.replaceChildren(el("p", { class: "mono name" }, clean(key)), el("pre", { class: "mono lines", tabindex: "0" }, lines.map(clean).join("\n")));
    } catch (error) {
      if (error.name !== "AbortError") showError(why, error);
    }
  };
  why.append(el("p", { class: "muted" }, "Choose an entry above."));
  let isFirst = true;
  const grid = new Grid(table, {
    label: "Compiled graphs", sort: parameters.sort || "-used_s", columns: columns(),
    read: async (offset, limit, sort) => {
      const page = await ask("cache", { sort, offset, limit, fresh: isFirst ? "true" : "" }, signal);
      isFirst = false;
      facts.replaceChildren(fact("Graphs", count(page.total), "keys"), fact("Size", bytes(page.bytes), "before sharing"), ...(page.damaged ? [fact("Damaged", count(page.damaged), "run holdfast check")] : []));
      return { total: page.total, rows: page.keys.map((key) => ({ ...key, seconds: Math.max(...key.variants.map((variant) => variant.compile_seconds)), torch: key.variants[0].torch })) };
    },
    open: (row) => explain(row.key), onSort: (sort) => note({ sort }), empty: "No compiled graph is stored here.",
  });
  await grid.reload(true);
  grid.node.focus({ preventScroll: true });
  if (parameters.key) explain(parameters.key);
  return { close: () => grid.close(), refresh: null };
}

function columns() {
  return [
    { name: "key", title: "Key", main: true, width: "minmax(150px, 2fr)", sort: "key", show: (row) => clean(row.key.slice(0, 16)) },
    { name: "used", title: "Last used", width: "152px", sort: "used_s", show: (row) => when(row.used_s) },
    { name: "days", title: "Days with hits", number: true, wide: 560, width: "124px", sort: "used_days", tip: "on how many days a process has loaded it: a hit is recorded once a day, and not on the day of the save", show: (row) => count(row.used_days) },
    { name: "bytes", title: "Size", number: true, wide: 480, width: "90px", sort: "bytes", show: (row) => bytes(row.bytes) },
    { name: "seconds", title: "Compiled in", number: true, wide: true, width: "110px", sort: "seconds", show: (row) => short(row.seconds) + " s" },
    { name: "variants", title: "Variants", number: true, wide: true, width: "90px", tip: "graphs with other guards", show: (row) => count(row.variants.length) },
    { name: "torch", title: "torch", wide: true, width: "120px", sort: "torch", show: (row) => clean(row.torch) },
    { name: "state", title: "State", wide: true, width: "minmax(90px, 1fr)", show: (row) => (row.variants.some((variant) => variant.damaged) ? "damaged" : row.variants.every((variant) => variant.signed) ? "signed" : "not signed") },
  ];
}
