// Plots as SVG: a logarithmic scale, with separate lanes for equal, not measured and not finite.
const HEIGHT = 276;
const EDGE = { left: 74, right: 14, top: 36, bottom: 44 };
const LANE = 22;
const LANES = { infinite: "not finite", unknown: "not measured", equal: "equal" };
const MEASURES = { rel: "relative L2", abs: "largest difference", ulp: "ULP", count: "tensors that differ" };
const PHASES = ["forward", "backward", "optimizer", "custom"];

function laneOf(value) {
  if (Number.isNaN(value)) return "unknown";
  if (value === Infinity) return "infinite";
  return value > 0 ? "" : "equal";
}

// From values to heights. A linear scale has no lanes.
function makeScale(values, isLinear) {
  const top = EDGE.top, bottom = HEIGHT - EDGE.bottom;
  if (isLinear) {
    const most = 1.06 * values.reduce((x, y) => Math.max(x, y), 1);
    const gap = niceGap(most / 4);
    const ticks = [];
    for (let tick = 0; tick <= most; tick += gap) ticks.push([tick, count(tick)]);
    return { lanes: [], ticks, y: (value) => bottom - (bottom - top) * (value / most) };
  }
  const used = new Set(values.map(laneOf));
  const above = used.has("infinite") ? 1 : 0;
  const below = (used.has("equal") ? 1 : 0) + (used.has("unknown") ? 1 : 0);
  const lanes = [];
  let floor = bottom;
  for (const name of ["equal", "unknown"]) if (used.has(name)) { lanes.push([name, floor - LANE / 2]); floor -= LANE; }
  if (above) lanes.push(["infinite", top + LANE / 2]);
  const roof = top + above * LANE;
  let low = Infinity, high = -Infinity;
  for (const value of values) if (laneOf(value) === "") { low = Math.min(low, value); high = Math.max(high, value); }
  const hasRange = high > 0;
  const from = hasRange ? Math.floor(Math.log10(low) - 0.05) : -8;
  const to = hasRange ? Math.max(from + 1, Math.ceil(Math.log10(high) + 0.05)) : 0;
  const rows = new Map(lanes);
  const ticks = [];
  const gap = Math.max(1, Math.ceil((to - from) / 6));
  for (let power = from; hasRange && power <= to; power += gap) ticks.push([10 ** power, "1e" + power]);
  const y = (value) => rows.get(laneOf(value)) ?? floor - 12 - (floor - 12 - roof - 4) * ((Math.log10(value) - from) / (to - from));
  return { lanes, ticks, y, floor: below ? floor : null };
}

function niceGap(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  const gap = [1, 2, 5, 10].find((factor) => factor * power >= least) * power;
  return Math.max(1, gap);
}

// spec: label, xName, yName, from, to, isLinear, xTicks [[x, text]], bands [[from, to, text]], mark {x, text},
// series [{name, css, isLine, points: [{x, value, row}]}], describe(point), choose(point).
function drawPlot(host, spec) {
  const width = Math.max(320, Math.round(host.clientWidth));
  const points = spec.series.flatMap((one) => one.points);
  const scale = makeScale(points.map((point) => point.value), spec.isLinear);
  const inner = width - EDGE.left - EDGE.right;
  const span = Math.max(1e-9, spec.to - spec.from);
  const x = (value) => EDGE.left + (inner * (value - spec.from)) / span;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": spec.label });
  drawGround(picture, spec, scale, x, width);
  for (const one of spec.series) {
    const places = one.points.map((point) => [x(point.x).toFixed(1), scale.y(point.value).toFixed(1)]);
    if (one.isLine && places.length > 1) picture.append(svg("path", { class: "line " + one.css, d: "M" + places.map((p) => p.join(" ")).join("L") }));
    if (!one.isLine || places.length < 60) picture.append(svg("path", { class: "dots " + one.css, d: thin(places).map((p) => "M" + p.join(" ") + "h0").join("") }));
  }
  if (spec.mark) drawMark(picture, spec.mark, x, width);
  addCursor(picture, points.map((point) => ({ ...point, left: x(point.x), top: scale.y(point.value) })), spec);
  host.replaceChildren(picture, drawKey(spec.series));
}

// Draws dots on the same pixel once, so that 50,000 of them cost no more than the pixels they cover.
function thin(places) {
  const seen = new Set();
  return places.filter(([left, top]) => {
    const pixel = Math.round(left) * 4096 + Math.round(top);
    if (seen.has(pixel)) return false;
    seen.add(pixel);
    return true;
  });
}

function drawGround(picture, spec, scale, x, width) {
  const bottom = HEIGHT - EDGE.bottom;
  (spec.bands || []).forEach(([from, to, label], index) => {
    const left = x(from), wide = x(to) - left;
    if (index % 2 === 0) picture.append(svg("rect", { class: "band", x: left, y: EDGE.top, width: Math.max(1, wide), height: bottom - EDGE.top }));
    if (wide > 7 * label.length) picture.append(svg("text", { x: left + wide / 2, y: EDGE.top - 7, "text-anchor": "middle" }, label));
  });
  for (const [value, label] of scale.ticks) {
    const top = scale.y(value);
    picture.append(svg("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: top, y2: top }));
    picture.append(svg("text", { x: EDGE.left - 8, y: top + 4, "text-anchor": "end" }, label));
  }
  for (const [name, top] of scale.lanes) picture.append(svg("text", { x: EDGE.left - 8, y: top + 4, "text-anchor": "end" }, LANES[name]));
  if (scale.floor) picture.append(svg("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: scale.floor, y2: scale.floor }));
  picture.append(svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom }));
  picture.append(svg("text", { class: "axis-name", x: width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, spec.xName));
  picture.append(svg("text", { class: "axis-name", x: 0, y: 11 }, spec.yName));
  for (const [value, label] of spec.xTicks) {
    picture.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
    picture.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, label));
  }
}

function drawMark(picture, mark, x, width) {
  const left = x(mark.x);
  const isRight = left > width - 160;
  picture.append(svg("line", { class: "origin-line", x1: left, x2: left, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
  picture.append(svg("text", { class: "origin-text", x: left + (isRight ? -6 : 6), y: mark.isAbove ? EDGE.top - 7 : EDGE.top + 11, "text-anchor": isRight ? "end" : "start" }, mark.text));
}

function roundTicks(size, most) {
  const gap = niceGap(size / most);
  const ticks = [];
  for (let place = gap; place <= size; place += gap) ticks.push([place - 1, count(place)]);
  return ticks;
}

function pickTicks(values, most) {
  const gap = Math.max(1, Math.ceil(values.length / most));
  return values.filter((_, at) => at % gap === 0);
}
