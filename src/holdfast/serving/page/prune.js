// What `holdfast prune` would delete, as a plan: its rules, and a decision with reasons for each snapshot.
import { ask } from "./api.js";
import { bytes } from "./charts.js";
import { clean, count, el } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { go, note } from "./router.js";

const RULES = [["prefix", "Below", "run1/"], ["keep_last", "Keep the last", "3"], ["keep_every", "Keep every", "1000"], ["keep_within", "Keep younger than", "7d"]];

export function drawPrune(parameters, signal) {
  const boxes = RULES.map(([name, title, example]) => el("label", {}, title + " ", box(name, parameters[name], example)));
  const [metric, number, mode] = (parameters.keep_best || "").split(":");
  const best = [box("best_metric", metric, "loss"), box("best_number", number, "1"), el("select", { name: "best_mode", "aria-label": "Which values are better" }, [["min", "smallest"], ["max", "largest"]].map(([value, title]) => el("option", { value, selected: value === mode }, title)))];
  const sentence = el("p", { role: "status", "aria-live": "polite" }), error = el("div"), table = el("div");
  const answer = el("div", { id: "plan", hidden: true }, error, sentence, table);
  const form = el("form", { class: "bar" }, boxes, el("label", { class: "best" }, "Keep the ", best[1], best[2], " ", best[0]), el("button", { type: "submit" }, "Plan"));
  best[1].setAttribute("aria-label", "Number of the best to keep");
  best[0].setAttribute("aria-label", "Metric of the best");
  let rules = {};
  const grid = new Grid(table, {
    label: "Plan of prune", sort: "verdict", columns: columns(),
    read: async (offset, limit, sort) => {
      const plan = await ask("prune", { ...rules, sort, offset, limit }, signal);
      sentence.textContent = `Prune would delete ${count(plan.delete)} ${plan.delete === 1 ? "snapshot" : "snapshots"} and keep ${count(plan.keep)}; gc could then free ${bytes(plan.freed_bytes)}.`;
      return { total: plan.total, rows: plan.verdicts };
    },
    open: (row) => go("snapshot", { name: row.name }), empty: "No snapshot to prune.",
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    rules = Object.fromEntries(boxes.map((label) => label.querySelector("input")).map((input) => [input.name, input.value.trim()]));
    const [name, size] = [best[0].value.trim(), best[1].value.trim()];
    rules.keep_best = name ? `${name}:${size || "1"}:${best[2].value}` : "";
    note(rules);
    answer.hidden = false;
    sentence.textContent = "";
    await grid.reload(true);
    // Of a rule that cannot be meant, the table shows the error.
    table.querySelector(".grid").hidden = grid.total === null;
  });
  const card = el("section", { class: "card", "aria-labelledby": "prune-title" }, el("h2", { id: "prune-title" }, "What prune would delete"),
    el("p", { class: "muted help" }, "A plan only: this page deletes nothing. A snapshot is kept if any rule keeps it, or if it has a tag."), form, answer);
  return { card, close: () => grid.close() };
}

function box(name, value, example) {
  return el("input", { name, class: "rule", value: value || "", placeholder: example, autocomplete: "off", spellcheck: "false" });
}

function columns() {
  return [
    { name: "verdict", title: "Verdict", width: "84px", sort: "verdict", show: (row) => (row.reasons.length ? "keep" : el("span", { class: "c-origin" }, "delete")) },
    { name: "name", title: "Name", main: true, width: "minmax(180px, 2fr)", sort: "name", show: (row) => clean(row.name) },
    { name: "bytes", title: "Size", number: true, wide: true, width: "96px", tip: "the size of the values, without sharing", show: (row) => bytes(row.bytes) },
    { name: "reasons", title: "Why it is kept", wide: 480, width: "minmax(120px, 2fr)", show: (row) => clean(row.reasons.join(", ")) },
  ];
}
