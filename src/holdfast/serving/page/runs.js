// The view of recorded runs: a list, which leads to each of them, and the comparison of two, which is shown by the page of `holdfast run report`.
import { ask } from "./api.js";
import { clean, count, el } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { address, go } from "./router.js";

export async function openRuns(main, parameters, signal) {
  const choice = el("div", { class: "bar", id: "picked" }), table = el("div"), status = el("span", { class: "muted", id: "shown", role: "status" });
  const result = el("section", { class: "card", "aria-label": "Comparison", id: "comparison" });
  if (parameters.a && parameters.b) main.append(result);
  main.append(el("section", { class: "card", "aria-labelledby": "runs-title" }, el("div", { class: "bar" }, el("h1", { class: "small", id: "runs-title" }, "Recorded runs"), status), choice, table));
  let picked = [parameters.a, parameters.b].filter(Boolean);
  let runs = [];
  const readRuns = async () => {
    ({ runs } = await ask("runs", {}, signal));
    status.textContent = `${count(runs.length)} ${runs.length === 1 ? "run" : "runs"}`;
  };
  await readRuns();
  const drawChoice = () => choice.replaceChildren(...(picked.length < 2
    ? [el("span", { class: "muted" }, "Enter, or a click, shows a run. Choose two to find where they diverge: click their boxes, or press Space.")]
    : [el("code", { class: "side-a" }, clean(picked[0])), el("span", { class: "muted" }, "and"), el("code", { class: "side-b" }, clean(picked[1])), el("a", { class: "button", id: "compare", href: address("runs", { a: picked[0], b: picked[1] }) }, "Compare")]));
  const pick = (name) => {
    picked = picked.includes(name) ? picked.filter((each) => each !== name) : [...picked, name].slice(-2);
    drawChoice();
    grid.redraw();
  };
  const grid = new Grid(table, {
    label: "Recorded runs", columns: columns(() => picked, pick),
    read: async (offset, limit) => ({ total: runs.length, rows: runs.slice(offset, offset + limit) }),
    open: (run) => go("run", { name: run.name }), toggle: (run) => pick(run.name),
    empty: "No run was recorded yet: `with store.record(\"good\", model, optimizer):` records one.",
  });
  drawChoice();
  await grid.reload(true);
  grid.node.focus({ preventScroll: true });
  if (parameters.a && parameters.b) compare(result, parameters, signal);
  return { close: () => grid.close(), watches: "runs", refresh: async () => { await readRuns(); await grid.reload(false); } };
}

function columns(picked, pick) {
  const box = (run) => {
    const node = el("input", { type: "checkbox", class: "pick", tabindex: "-1", "aria-label": "Compare " + clean(run.name) });
    node.checked = picked().includes(run.name);
    node.addEventListener("change", () => pick(run.name));
    return [node];
  };
  return [
    { name: "pick", title: "", tip: "Chosen for a comparison", width: "36px", show: box },
    { name: "name", title: "Name", main: true, width: "minmax(180px, 2fr)", show: (run) => [el("a", { href: address("run", { name: run.name }), tabindex: "-1" }, clean(run.name))] },
    { name: "status", title: "Status", width: "100px", show: (run) => clean(run.status) },
    { name: "ranks", title: "Ranks", number: true, width: "64px", show: (run) => count(run.world) },
    { name: "started", title: "Started (UTC)", wide: true, width: "180px", show: (run) => clean((run.started || "").replace("T", " ").replace("Z", "")) },
    { name: "notes", title: "Notes", wide: true, width: "minmax(120px, 2fr)", show: (run) => clean(run.notes.join("; ")) },
  ];
}

async function compare(host, { a, b }, signal) {
  host.replaceChildren(el("p", { class: "muted", role: "status" }, "Comparing ", el("code", {}, clean(a)), " and ", el("code", {}, clean(b)), "\u2026"));
  try {
    const found = await ask("report", { a, b }, signal);
    host.replaceChildren(
      el("span", { class: "pill " + (found.is_match ? "c-equal" : "c-origin") }, found.is_match ? "The runs match" : "The runs differ"),
      el("h1", { class: "name" }, clean(found.headline)),
      el("p", {}, el("a", { class: "button", id: "report", href: found.path }, "Open the report: origins, propagation, every tensor")));
  } catch (error) {
    if (error.name !== "AbortError") showError(host, error);
  }
}
