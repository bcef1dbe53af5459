// The overview; starts all parts of the page.
function startOverview() {
  byId("runs").append(el("code", { class: "side-a" }, clean(data.a.name)), el("span", { class: "muted" }, "  and  "), el("code", { class: "side-b" }, clean(data.b.name)));
  const verdict = byId("verdict");
  verdict.classList.toggle("differs", !data.equal && !data.undecided);
  const [color, result] = data.equal ? ["c-equal", "The runs match"] : data.undecided ? ["c-other", "Not all could be compared"] : ["c-origin", "The runs differ"];
  verdict.append(el("span", { class: "pill " + color }, result));
  verdict.append(el("h1", { class: "name" }, clean(data.headline)));
  if (data.origin >= 0) {
    if (data.cause) verdict.append(el("p", { id: "cause" }, "Cause: ", el("strong", {}, clean(data.cause))));
    for (const hint of data.hints) verdict.append(el("p", { class: "muted hint" }, clean(hint)));
    for (const [name, tensors] of [["Inputs", data.inputs], ["Parameters", data.parameters]]) {
      if (tensors.length) verdict.append(el("p", { class: "muted" }, name + ": ", el("span", { class: "mono name" }, tensors.map(clean).join(", "))));
    }
    verdict.append(el("div", { class: "bar" },
      el("button", { type: "button", id: "show-origin", onclick: () => openDetail(data.origin) }, "Show this tensor"),
      el("span", { class: "muted" }, clean(data.tolerance))));
  } else if (data.tolerance) verdict.append(el("p", { class: "muted" }, clean(data.tolerance)));
  for (const note of data.notes) verdict.append(el("p", { class: "muted" }, clean(note)));
}

function startCounts() {
  for (const verdict of CLASSES) {
    const number = data.counts[verdict] || 0;
    const tile = el("button", { type: "button", class: "tile " + className(verdict), "data-verdict": verdict, title: EXPLAINED[verdict], "aria-pressed": "false", onclick: () => pickVerdict(verdict) },
      el("span", {}, verdict), el("strong", {}, count(number)), el("small", {}, MEANING[verdict]));
    tile.disabled = !rows.text.includes(verdict);
    byId("counts").append(tile);
  }
  document.addEventListener("filtered", () => {
    for (const tile of byId("counts").children) tile.setAttribute("aria-pressed", String(rows.text[table.picked.verdict] === tile.dataset.verdict));
  });
}

function describeSteps(steps) {
  if (!steps.length) return "none";
  const isRange = steps[steps.length - 1] - steps[0] === steps.length - 1;
  return isRange && steps.length > 1 ? `${steps[0]} to ${steps[steps.length - 1]}` : clean(steps.slice(0, 12).join(", ")) + (steps.length > 12 ? `, \u2026 (${count(steps.length)})` : "");
}

function startFacts() {
  const lines = [
    ["Steps", (run) => describeSteps(run.steps)],
    ["Ranks", (run) => String(run.world)],
    ["Status", (run) => clean(run.status)],
    ["Started", (run) => (run.started ? clean(run.started) : "")],
    ...(data.environment.length ? [] : [["Environment", () => "the same in both runs"]]),
  ];
  const head = () => el("thead", {}, el("tr", {}, el("td"), el("th", { scope: "col", class: "side-a" }, clean(data.a.name)), el("th", { scope: "col", class: "side-b" }, clean(data.b.name))));
  const body = el("tbody");
  for (const [title, show] of lines) body.append(el("tr", {}, el("th", { scope: "row" }, title), el("td", {}, show(data.a)), el("td", {}, show(data.b))));
  const card = el("section", { class: "card", "aria-label": "Runs" }, el("h2", {}, "Runs"), el("div", { class: "facts", tabindex: "0", role: "group", "aria-label": "Facts of both runs" }, el("table", {}, head(), body), drawNotes()));
  byId("facts").append(card);
  byId("facts").classList.toggle("single", !data.environment.length);
  if (!data.environment.length) return;
  const differences = el("tbody");
  for (const [key, a, b] of data.environment) differences.append(el("tr", {}, el("th", { scope: "row", class: "mono name" }, clean(key)), el("td", { class: "mono" }, clean(a)), el("td", { class: "mono" }, clean(b))));
  byId("facts").append(el("section", { class: "card", "aria-label": "Environment" },
    el("h2", {}, `Environment: ${count(data.environment.length)} differ`),
    el("div", { class: "facts", tabindex: "0", role: "group", "aria-label": "Differences of the environment" }, el("table", {}, head(), differences))));
}

function drawNotes() {
  const list = el("ul", { class: "notes" });
  const shared = new Set(data.a.notes.filter((note) => data.b.notes.includes(note)));
  for (const note of shared) list.append(el("li", {}, "Both: " + clean(note)));
  for (const run of [data.a, data.b]) {
    for (const note of run.notes) if (!shared.has(note)) list.append(el("li", {}, el("code", {}, clean(run.name)), ": " + clean(note)));
  }
  return list.children.length ? list : null;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeDetail();
  if (event.key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) {
    event.preventDefault();
    byId("words").focus();
  }
});

startTheme(byId("theme"));
startOverview();
startCounts();
startFacts();
startTable();
startCharts();
