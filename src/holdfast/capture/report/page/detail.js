// The panel for one tensor: facts, differences, statistics and histograms of both runs, and the same tensor in other steps.
const detail = { row: -1, isLog: false, back: null };

function openDetail(row) {
  const panel = byId("detail");
  if (panel.hidden) detail.back = document.activeElement;
  const isFresh = panel.hidden;
  detail.row = row;
  panel.hidden = false;
  panel.replaceChildren(...drawDetail(row));
  panel.scrollTop = 0;
  if (isFresh && detail.back !== byId("grid")) byId("detail-close").focus();
}

function closeDetail() {
  if (byId("detail").hidden) return;
  byId("detail").hidden = true;
  if (detail.back && detail.back.isConnected) detail.back.focus({ preventScroll: true });
}

function moveDetail(by) {
  const at = table.order.indexOf(detail.row);
  if (at >= 0) table.lines.activate(at + by, true);
}

function drawDetail(row) {
  const more = data.details[row] || {};
  const bar = el("div", { class: "bar" },
    pill(text("verdict", row)), el("span", { class: "muted" }, MEANING[text("verdict", row)] || ""), el("span", { class: "spring" }),
    el("button", { type: "button", class: "quiet", "aria-label": "Previous tensor", onclick: () => moveDetail(-1) }, "\u2191"),
    el("button", { type: "button", class: "quiet", "aria-label": "Next tensor", onclick: () => moveDetail(1) }, "\u2193"),
    el("button", { type: "button", id: "detail-close", onclick: closeDetail }, "Close"));
  const where = `step ${rows.step[row]}, ${text("phase", row)}, ${text("kind", row)}, call ${rows.call[row]}, rank ${rows.rank[row]}`;
  return [
    bar,
    el("h2", { class: "name mono" }, fullName(row)),
    el("p", { class: "muted" }, where),
    text("note", row) ? el("p", {}, text("note", row)) : null,
    drawFacts(row),
    ...drawDistance(row, more),
    ...drawValues(more),
    ...drawHistory(row),
  ].filter(Boolean);
}

function drawPairs(pairs) {
  const body = el("tbody");
  for (const [name, value] of pairs) if (value !== "" && value !== null) body.append(el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)));
  return body.children.length ? el("table", {}, body) : null;
}

function drawFacts(row) {
  const tensor = text("dtype", row) + " " + text("shape", row);
  return drawPairs([
    ["Tensor", el("code", {}, tensor)],
    ["Module", text("module", row) && el("code", {}, text("module", row))],
    ["Source", text("source", row) && el("code", {}, text("source", row))],
    ["Paired", text("pairing", row)],
  ]);
}

function drawDistance(row, more) {
  const at = more.at ? ` at (${more.at.join(", ")}): ` : "";
  const both = more.at ? [el("span", { class: "side-a" }, clean(more.values[0])), " and ", el("span", { class: "side-b" }, clean(more.values[1]))] : [];
  const made = drawPairs([
    ["Relative L2", short(rows.rel[row])],
    ["Largest difference", Number.isNaN(rows.abs[row]) ? "" : el("span", {}, short(rows.abs[row]) + at, ...both)],
    ["Cosine", cosine(rows.cos[row])],
    ["SQNR", Number.isNaN(rows.sqnr[row]) ? "" : short(rows.sqnr[row]) + " dB"],
    ["Largest in ULP", ulps(rows.ulp[row])],
    ["Outside tolerance", percent(rows.mismatch[row])],
    ["NaN/Inf", text("bad", row)],
  ]);
  if (made) return [el("h3", {}, "Difference"), made];
  const isKnown = ["EQUAL", "MISSING", "UNKNOWN"].includes(text("verdict", row));
  return isKnown ? [] : [el("p", { class: "muted" }, "Not measured: the bytes of this tensor were not kept in both runs. Record it with level=\"full\" to see by how much it differs.")];
}

function drawValues(more) {
  const sides = [more.a, more.b];
  if (!sides.some(Boolean)) return [];
  const lines = [["Minimum", "min"], ["Maximum", "max"], ["Mean", "mean"], ["Norm", "norm"], ["Zeros", "zero"], ["NaN", "nan"], ["Inf", "inf"]];
  const body = el("tbody");
  for (const [title, name] of lines) {
    body.append(el("tr", {}, el("th", { scope: "row" }, title), ...sides.map((side) => el("td", {}, side ? exact(numeral(side[name])) : ""))));
  }
  const head = el("thead", {}, el("tr", {}, el("td"), el("th", { scope: "col", class: "side-a" }, clean(data.a.name)), el("th", { scope: "col", class: "side-b" }, clean(data.b.name))));
  const names = [data.a.name, data.b.name];
  const host = el("div", { class: "chart plot" });
  const toggle = el("button", { type: "button", class: "quiet", "aria-pressed": String(detail.isLog), onclick: (event) => {
    detail.isLog = !detail.isLog;
    event.target.setAttribute("aria-pressed", String(detail.isLog));
    drawHistogram(host, sides, names, detail.isLog);
  } }, "Logarithmic");
  drawHistogram(host, sides, names, detail.isLog);
  const hasBins = sides.some((side) => side && side.histogram.length);
  return [el("h3", {}, "Values"), el("table", {}, head, body), hasBins ? el("div", { class: "bar" }, el("h3", {}, "Histogram"), el("span", { class: "spring" }), toggle) : null, hasBins ? host : null];
}

function drawHistory(row) {
  const same = ["fqn", "kind", "phase", "path", "call", "rank"];
  const found = [];
  for (let other = 0; other < rows.size; other++) if (same.every((name) => rows[name][other] === rows[name][row])) found.push(other);
  if (found.length < 2) return [];
  const body = el("tbody");
  for (const other of found.slice(0, 40)) {
    const step = other === row ? el("strong", {}, String(rows.step[other])) : el("button", { type: "button", class: "quiet", onclick: () => openDetail(other) }, String(rows.step[other]));
    body.append(el("tr", {}, el("td", {}, step), el("td", {}, pill(text("verdict", other))), el("td", {}, short(rows.rel[other])), el("td", {}, short(rows.abs[other]))));
  }
  const head = el("thead", {}, el("tr", {}, ...["Step", "Class", "Rel. L2", "Max |d|"].map((title) => el("th", { scope: "col" }, title))));
  return [el("h3", {}, "This tensor in other steps"), el("table", {}, head, body)];
}
