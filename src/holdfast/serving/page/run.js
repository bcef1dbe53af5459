// The view of one recorded run: its facts, its first NaN or Inf, and its tensors with their statistics.
import { ask } from "./api.js";
import { shaped } from "./charts.js";
import { clean, count, el, short } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { address, note } from "./router.js";
import { fact, link, pairs } from "./snapshot.js";

const LEVELS = { full: "with values", stats: "with statistics", digest: "digests only" };

export async function openRun(main, parameters, signal) {
  const found = await ask("run", { name: parameters.name }, signal);
  const view = new RunView(main, found, parameters, signal);
  view.readNonfinite();
  await view.start();
  return { close: () => view.grid.close(), watches: "runs", refresh: () => view.refresh() };
}

class RunView {
  constructor(main, found, parameters, signal) {
    Object.assign(this, { name: found.name, found, signal, filter: parameters.filter || "", step: parameters.step || "", row: parameters.row || "", near: {}, moves: Promise.resolve() });
    this.head = el("section", { class: "card", id: "about", "aria-label": "Facts" });
    this.nonfinite = el("div", { id: "nonfinite", "aria-live": "polite" }, el("p", { class: "muted" }, "Reading\u2026"));
    this.box = el("input", { type: "search", value: this.filter, placeholder: "Filter: output, or a part of a name", autocomplete: "off", spellcheck: "false", "aria-label": "Filter by kind, phase, a part of a name, or a glob" });
    this.status = el("span", { class: "muted", id: "shown", role: "status", "aria-live": "polite" });
    const table = el("div");
    this.detail = el("div", { id: "event", "aria-live": "polite" });
    main.append(this.head,
      el("section", { class: "card", "aria-labelledby": "nan-title" }, el("h2", { id: "nan-title" }, "First NaN or Inf"), this.nonfinite),
      el("section", { class: "card", "aria-labelledby": "events-title" },
        el("div", { class: "bar filters" }, el("h2", { id: "events-title" }, "Tensors"), el("label", { class: "search" }, this.box), this.makeSteps(), this.status), table, this.detail));
    this.drawHead();
    this.grid = new Grid(table, {
      label: "Tensors", columns: columns(found), read: (offset, limit) => this.read(offset, limit), open: (row) => this.open(row),
      empty: "No tensor matches. Clear the filter, or choose another step.",
    });
    let timer = 0;
    this.box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => this.choose({ filter: this.box.value }), 150); });
  }

  makeSteps() {
    const button = (id, title, step) => el("button", { type: "button", class: "quiet", id, onclick: () => this.go(step) }, title);
    this.number = el("input", { type: "number", id: "step", min: "0", step: "1", value: this.step, class: "rule", placeholder: "all", autocomplete: "off", "aria-label": "Step; empty for all steps", onchange: () => this.choose({ step: this.number.value.trim() }) });
    this.previous = button("previous-step", "\u2039 Previous", () => this.near.previous);
    this.next = button("next-step", "Next \u203a", () => (this.step === "" ? this.found.steps.first : this.near.next));
    return el("span", { class: "steps", role: "group", "aria-label": "Step" }, el("span", { class: "muted" }, "Step"), this.previous, this.number, this.next, this.every = button("every-step", "All steps", () => ""));
  }

  async start() {
    await this.grid.reload(true);
    this.grid.node.focus({ preventScroll: true });
    const at = Number(this.row);
    if (this.row === "" || !Number.isInteger(at) || at < 0) return;
    await this.grid.openAt(at);
    this.grid.node.scrollIntoView({ block: "nearest" });
  }

  // The step before or after one is known once its rows are there; so quick clicks wait for each other.
  go(find) {
    this.moves = this.moves.then(() => { const step = find(); return step === null || step === undefined ? null : this.choose({ step: String(step) }); });
  }

  // Shows another step or filter: reloads the table, and writes both into the address.
  choose(chosen) {
    Object.assign(this, chosen, { row: "" });
    note({ step: this.step, filter: this.filter, row: "" });
    this.number.value = this.step;
    this.detail.replaceChildren();
    return this.grid.reload(true);
  }

  async read(offset, limit) {
    const { filter, step } = this;
    const page = await ask("events", { name: this.name, filter, step, offset, limit }, this.signal);
    // Of two answers that cross, the one to the last choice counts.
    if (filter === this.filter && step === this.step) this.drawSteps(page);
    return { total: page.total, rows: page.events.map((event, at) => ({ ...event, at: offset + at })) };
  }

  drawSteps(page) {
    this.near = page.steps;
    const isAll = this.step === "", focused = document.activeElement;
    this.previous.disabled = page.steps.previous === null;
    this.next.disabled = isAll ? page.steps.count === 0 : page.steps.next === null;
    this.every.disabled = isAll;
    // A button that is disabled loses the focus, and keys would start at the top of the page again.
    if (focused.disabled) this.number.focus();
    this.status.textContent = this.filter || !isAll ? `${count(page.total)} of ${count(this.found.events)} tensors` : `${count(page.total)} tensors`;
  }

  open(row) {
    note({ row: String(row.at) });
    const { stats } = row;
    const facts = pairs([
      ["Where", `step ${row.step}, ${clean(row.phase)}, rank ${row.rank}`],
      ["Tensor", `${clean(row.kind)}, ${clean(row.dtype)} ${shaped(row.shape)}${row.placement ? ", " + clean(row.placement) : ""}`],
      ["Module", clean(row.module)],
      ["Source", row.source ? el("code", {}, clean(row.source)) : ""],
      ["Recorded", LEVELS[row.level] || clean(row.level)],
      ["Finite values", stats ? `min ${spell(stats.minimum)}, max ${spell(stats.maximum)}, mean ${spell(stats.mean)}, norm ${spell(stats.norm)}` : ""],
      ["Numbers of", stats ? `NaN ${count(stats.nan)}, Inf ${count(stats.inf)}, zero ${count(stats.zero)}` : ""],
      ["Digest", el("code", { class: "name" }, clean(row.blake3 || row.digest))],
    ]);
    facts.className = "narrow";
    this.detail.replaceChildren(el("h3", { class: "name" }, label(row)), facts);
    this.detail.scrollIntoView({ block: "nearest" });
  }

  async readNonfinite() {
    try {
      const found = await ask("nonfinite", { name: this.name }, this.signal);
      this.nonfinite.replaceChildren(...this.drawNonfinite(found));
    } catch (error) {
      if (error.name !== "AbortError") showError(this.nonfinite, error);
    }
  }

  drawNonfinite(found) {
    const { origin } = found;
    const [text, color] = origin ? ["Found", "c-origin"] : found.unknown ? ["Not known", "c-propagated"] : ["None", "c-equal"];
    const sentence = el("p", {}, el("span", { class: "pill " + color }, text), " ", el("span", { class: "name" }, clean(found.headline)));
    if (!origin) return [sentence, ...drawNotes(found.notes.filter((each) => !this.found.notes.includes(each)))];
    const place = el("p", {}, el("a", { id: "nan-row", class: "button", href: address("run", { name: this.name, step: String(origin.site.step), row: found.row === null ? "" : String(found.row) }) },
      `Show it: step ${origin.site.step}, ${clean(origin.site.phase)}, ${clean(origin.site.kind)} of ${label(origin.site)}`));
    const inputs = [...origin.inputs, ...origin.parameters].map((each) => `${clean(each.name)} ${each.standing === "equal" ? "finite" : clean(each.standing)}`);
    const others = found.origins.length - 1;
    const total = `${count(found.nan)} ${found.nan === 1 ? "tensor" : "tensors"} with NaN, ${count(found.inf)} with Inf${found.unknown ? `, ${count(found.unknown)} not known` : ""}.`;
    return [sentence, place, inputs.length ? el("p", { class: "muted name" }, `Computed from: ${inputs.join(", ")}.`) : "",
      el("p", { class: "muted" }, others ? `${total} ${count(others)} more ${others === 1 ? "was" : "were"} computed from finite values.` : total)];
  }

  async refresh() {
    this.found = await ask("run", { name: this.name }, this.signal);
    this.drawHead();
    await Promise.all([this.grid.reload(false), this.readNonfinite()]);
  }

  drawHead() {
    const { found } = this, { steps, levels } = found, isOpen = Boolean(this.head.querySelector("details[open]"));
    const kept = Object.keys(LEVELS).filter((level) => levels[level]);
    const settings = Object.entries(found.environment);
    const folded = settings.length ? el("details", { open: isOpen }, el("summary", {}, `Environment: ${count(settings.length)} ${settings.length === 1 ? "setting" : "settings"}`), el("div", { class: "facts", tabindex: "0" }, pairs(settings.map(([name, value]) => [clean(name), el("span", { class: "name" }, clean(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 2000))])))) : null;
    this.head.replaceChildren(
      el("p", { class: "muted crumbs" }, link("runs", {}, "Runs"), " \u203a"),
      el("div", { class: "bar" }, el("h1", { class: "mono name" }, clean(found.name)), el("span", { class: "pill " + (found.status === "complete" ? "c-equal" : "c-propagated"), id: "status" }, clean(found.status))),
      el("div", { class: "facts-row" },
        fact("Started", clean((found.started || "").replace("T", " ").replace("Z", "")) || "not known", "UTC"),
        fact("Steps", count(steps.count), steps.count ? `from ${steps.first} to ${steps.last}` : "none yet"),
        fact("Tensors", count(found.events), kept.map((level) => (kept.length > 1 ? count(levels[level]) + " " : "") + LEVELS[level]).join(", ") || "none yet"),
        fact("Ranks", count(found.world), found.ranks.length === found.world ? "all recorded" : `${count(found.ranks.length)} recorded so far`)),
      ...drawNotes(found.notes), folded || "");
  }
}

function drawNotes(notes) {
  return notes.map((each) => el("p", { class: "muted name" }, "Note: " + clean(each)));
}

// As `holdfast run events` prints it.
function label(site) {
  return clean((site.fqn || "(the model)") + site.path + (site.call ? " #" + site.call : "") + (site.recompute ? " (again)" : ""));
}

function columns(found) {
  const number = (name, title, tip) => ({ name, title, number: true, wide: true, width: "84px", tip, show: (row) => (row.stats ? spell(row.stats[name]) : "") });
  const bad = (name, title) => ({ name, title, number: true, wide: 340, width: "minmax(44px, 64px)", show: (row) => (row.stats ? (row.stats[name] ? [el("strong", { class: "c-origin" }, count(row.stats[name]))] : "0") : "") });
  return [
    { name: "step", title: "Step", number: true, wide: 480, width: "64px", show: (row) => String(row.step) },
    ...(found.world > 1 ? [{ name: "rank", title: "Rank", number: true, wide: 480, width: "54px", show: (row) => String(row.rank) }] : []),
    { name: "kind", title: "Kind", width: "92px", show: (row) => clean(row.kind) },
    { name: "name", title: "Name", main: true, width: "minmax(190px, 3fr)", show: (row) => label(row) },
    { name: "dtype", title: "dtype", wide: 860, width: "84px", show: (row) => clean(row.dtype) },
    { name: "shape", title: "Shape", wide: 860, width: "minmax(96px, 1fr)", show: (row) => shaped(row.shape) },
    number("minimum", "Min", "of the finite values"), number("maximum", "Max", "of the finite values"), number("mean", "Mean", "of the finite values"), number("norm", "Norm", "of the finite values"),
    bad("nan", "NaN"), bad("inf", "Inf"),
  ];
}

// Numbers that JSON cannot express are texts.
function spell(value) {
  return typeof value === "string" ? clean(value) : short(value);
}
