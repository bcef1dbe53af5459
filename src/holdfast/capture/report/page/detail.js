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
  if (at >= 0) activate(at + by, true);
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
  const isKnown = ["EQUAL", "MISSING"].includes(text("verdict", row));
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
  const host = el("div", { class: "chart plot" });
  const toggle = el("button", { type: "button", class: "quiet", "aria-pressed": String(detail.isLog), onclick: (event) => {
    detail.isLog = !detail.isLog;
    event.target.setAttribute("aria-pressed", String(detail.isLog));
    drawHistogram(host, sides);
  } }, "Logarithmic");
  drawHistogram(host, sides);
  const hasBins = sides.some((side) => side && side.histogram.length);
  return [el("h3", {}, "Values"), el("table", {}, head, body), hasBins ? el("div", { class: "bar" }, el("h3", {}, "Histogram"), el("span", { class: "spring" }), toggle) : null, hasBins ? host : null];
}

// Both runs on one axis, as densities, because their bins may differ.
function drawHistogram(host, sides) {
  const width = 540, height = 190, left = 8, bottom = height - 24, top = 8;
  const drawn = sides.map((side) => (side && side.histogram.length ? side : null));
  const ends = drawn.filter(Boolean).map((side) => [numeral(side.low), numeral(side.high)]);
  if (!ends.length) return;
  let low = Math.min(...ends.map((end) => end[0])), high = Math.max(...ends.map((end) => end[1]));
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const x = (value) => left + ((width - 2 * left) * (value - low)) / (high - low);
  const shapes = drawn.map((side) => side && densities(side, high - low));
  const most = Math.max(...shapes.filter(Boolean).flatMap((bins) => bins.map((bin) => bin[2])), 1e-300);
  const least = Math.min(...shapes.filter(Boolean).flatMap((bins) => bins.map((bin) => bin[2]).filter((size) => size > 0)));
  const rise = detail.isLog ? (size) => (size > 0 ? (Math.log(size / least) + 0.7) / (Math.log(most / least) + 0.7) : 0) : (size) => size / most;
  const y = (size) => bottom - (bottom - top) * rise(size);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histograms from ${short(low)} to ${short(high)}` });
  if (shapes[0]) for (const [from, to, size] of shapes[0]) picture.append(svg("rect", { class: "bars-a", x: x(from), width: Math.max(0.5, x(to) - x(from) - 0.5), y: y(size), height: bottom - y(size) }));
  if (shapes[1]) picture.append(svg("path", { class: "steps-b", d: outline(shapes[1], x, y, bottom) }));
  picture.append(svg("line", { class: "axis", x1: left, x2: width - left, y1: bottom, y2: bottom }));
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const value = low + (high - low) * part;
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    picture.append(svg("text", { x: x(value), y: height - 7, "text-anchor": anchor }, short(Math.abs(value) < (high - low) * 1e-9 ? 0 : value)));
  }
  host.replaceChildren(picture, el("div", { class: "key" }, el("span", { class: "side-a" }, "\u25A0 " + clean(data.a.name)), el("span", { class: "side-b" }, "\u2014 " + clean(data.b.name))));
}

function densities(side, span) {
  const low = numeral(side.low), high = numeral(side.high);
  const total = side.histogram.reduce((x, y) => x + y, 0) || 1;
  // All values the same: one thin bar.
  const width = high > low ? (high - low) / side.histogram.length : span / 40 || 0.05;
  const start = high > low ? low : low - (width * side.histogram.length) / 2;
  return side.histogram.map((size, at) => [start + width * at, start + width * (at + 1), size / total / width]);
}

function outline(bins, x, y, bottom) {
  const corners = bins.map(([from, to, size]) => `L${x(from).toFixed(1)} ${y(size).toFixed(1)}L${x(to).toFixed(1)} ${y(size).toFixed(1)}`);
  return `M${x(bins[0][0]).toFixed(1)} ${bottom}${corners.join("")}L${x(bins[bins.length - 1][1]).toFixed(1)} ${bottom}`;
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
