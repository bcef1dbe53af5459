// Charts as SVG and canvas: lines over steps or times, sparklines, and heat maps. Each has a tip, and works with keys.
import { addCursor, drawKey, hideTip, showTip } from "./cursor.js";
import { clean, count, el, short, svg } from "./elements.js";

const HEIGHT = 252, EDGE = { left: 64, right: 16, top: 26, bottom: 42 }, MAX_MARKS = 100;

export function bytes(size) {
  if (size === null || size === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; size >= 1000 && unit < units.length - 1; unit++) size /= 1024;
  return unit ? size.toFixed(size >= 100 ? 0 : 1) + " " + units[unit] : size + " B";
}

// As Python writes a tuple.
export function shaped(shape) {
  return `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
}

export function when(seconds) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "@" + seconds;
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

// least: the smallest distance of two ticks, such as 1 for steps.
export function niceTicks(low, high, most, least = 0) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / most));
  const gap = Math.max(least, [1, 2, 5, 10].find((factor) => (factor * power * most) >= span) * power);
  const ticks = [];
  for (let tick = Math.ceil(low / gap); tick * gap <= high + gap * 1e-9; tick++) ticks.push(Number((tick * gap).toPrecision(12)));
  return ticks;
}

// Replaces a picture by a new one; the new one has the focus if the old one had it.
export function renew(host, ...nodes) {
  const hadFocus = host.contains(document.activeElement);
  host.replaceChildren(...nodes);
  if (hadFocus) host.querySelector("[tabindex]").focus({ preventScroll: true });
}

// From values to heights, and ticks. A logarithmic scale shows values above 0 only.
function makeScale(values, isLog, unit) {
  let [low, high] = ends(values);
  if (isLog) {
    const [from, to] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)], top = Math.max(to, from + 1);
    const gap = Math.ceil((top - from) / 6), ticks = [];
    for (let power = from; power <= top; power += gap) ticks.push(Number("1e" + power));
    return { ticks, share: (value) => (Math.log10(value) - from) / (top - from) };
  }
  const pad = (high - low) * 0.06 || Math.abs(low) * 0.1 || 0.5;
  [low, high] = [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  const ticks = unit ? niceTicks(low / unit, high / unit, 6, unit > 1 ? 0.1 : 1).map((tick) => tick * unit) : niceTicks(low, high, 6);
  return { ticks, share: (value) => (value - low) / (high - low) };
}

// spec: label, xName, yName, series [{name, points: [{x, y, ...}]}], showX(x), showY(y), describe(point), choose(point),
// marks [{x, text, title}] (where a value cannot be drawn), isLog (a logarithmic y axis), xLeast (the smallest distance of two
// ticks), yUnit (of sizes, so that ticks are round in it).
export function drawLines(host, spec) {
  const width = Math.max(300, Math.round(host.clientWidth));
  const drawn = spec.isLog ? spec.series.map((one) => ({ ...one, points: one.points.filter((point) => point.y > 0) })) : spec.series;
  const points = drawn.flatMap((one, at) => one.points.map((point) => ({ ...point, at })));
  if (!points.length) {
    host.replaceChildren(el("p", { class: "muted" }, spec.isLog && spec.series.length ? "No value here is above 0: a logarithmic scale cannot show it." : "No snapshot here has this number."));
    return;
  }
  const steps = scaleSteps([...points, ...(spec.marks || [])].map((point) => point.x), EDGE.left, width - EDGE.right), { x } = steps;
  const scale = makeScale(points.map((point) => point.y), spec.isLog, spec.yUnit);
  const y = (value) => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * scale.share(value);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": spec.label });
  picture.append(svg("text", { class: "axis-name", x: 0, y: 11 }, spec.yName + (spec.isLog ? ", logarithmic" : "")));
  for (const tick of scale.ticks) {
    picture.append(svg("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }));
    picture.append(svg("text", { x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.showY(tick)));
  }
  const bottom = HEIGHT - EDGE.bottom;
  drawSteps(picture, steps, bottom, spec);
  const series = drawn.map((one, at) => ({ ...one, css: "p-" + (at % 12), isLine: true }));
  for (const one of series) {
    const path = thin(one.points.map((point) => [x(point.x), y(point.y)]), width);
    if (path.length > 1) picture.append(svg("path", { class: "line " + one.css, d: "M" + path.map((p) => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L") }));
    if (path.length < 120) picture.append(svg("path", { class: "dots " + one.css, d: path.map((p) => `M${p[0].toFixed(1)} ${p[1].toFixed(1)}h0`).join("") }));
  }
  drawMarks(picture, (spec.marks || []).slice(0, MAX_MARKS), x, bottom);
  addCursor(picture, points.map((point) => ({ ...point, left: x(point.x), top: y(point.y) })), spec);
  renew(host, picture, series.length > 1 ? drawKey(series) : "");
}

// From steps or times to places between left and right.
export function scaleSteps(values, left, right) {
  const [low, high] = ends(values), [from, to] = low < high ? [low, high] : [low - 0.5, high + 0.5];
  return { low, high, left, right, x: (value) => left + ((right - left) * (value - from)) / (to - from) };
}

// Draws the axis of steps or times. spec: xName, xWidth (of a label), xLeast, showX(x).
export function drawSteps(picture, { low, high, left, right, x }, bottom, spec) {
  picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  const found = low < high ? niceTicks(low, high, Math.max(2, Math.floor((right + EDGE.right) / (spec.xWidth || 90))), spec.xLeast) : [];
  for (const tick of found.length ? found : [low]) {
    picture.append(svg("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, spec.showX(tick)));
  }
  picture.append(svg("text", { class: "axis-name", x: right, y: bottom + 34, "text-anchor": "end" }, spec.xName));
}

function drawMarks(picture, marks, x, bottom) {
  let free = -Infinity;
  for (const mark of [...marks].sort((p, q) => p.x - q.x)) {
    const left = x(mark.x), line = svg("line", { class: "origin-line", x1: left, x2: left, y1: EDGE.top, y2: bottom });
    line.append(svg("title", {}, `${clean(mark.title)}: ${mark.text}`));
    picture.append(line);
    // One label for marks that are close together.
    if (left > free) picture.append(svg("text", { class: "origin-text", x: left, y: EDGE.top - 4, "text-anchor": "middle" }, mark.text));
    free = Math.max(free, left + 30);
  }
}

export function ends(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// Of many points on one column of pixels, keeps the first, the lowest, the highest and the last.
function thin(places, width) {
  if (places.length < 4 * width) return places;
  const columns = new Map();
  for (const place of places) {
    const column = Math.round(place[0]);
    const kept = columns.get(column);
    if (!kept) columns.set(column, [place, place, place, place]);
    else {
      if (place[1] < kept[1][1]) kept[1] = place;
      if (place[1] > kept[2][1]) kept[2] = place;
      kept[3] = place;
    }
  }
  return [...columns.values()].flat();
}

// Draws each list of values over the whole width, on one scale.
export function sparkline(lists) {
  const picture = svg("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  const [low, high] = ends(lists.flat()), span = high - low || 1;
  lists.forEach((values, number) => {
    if (values.length < 2) return;
    const places = values.map((value, at) => [(120 * at) / (values.length - 1), 25 - (22 * (value - low)) / span]);
    picture.append(svg("path", { class: "line p-" + number, "vector-effect": "non-scaling-stroke", d: "M" + thin(places, 120).map((p) => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L") }));
  });
  return picture;
}

const MOST_CELL = 64;

// Colours: from the one of the page's background to a strong one, for both signs.
const PALETTES = {
  light: { zero: [246, 246, 244], plus: [178, 60, 10], minus: [30, 70, 190], none: [200, 200, 205], bad: [107, 63, 176] },
  dark: { zero: [34, 36, 42], plus: [255, 150, 80], minus: [120, 165, 255], none: [80, 82, 90], bad: [200, 168, 255] },
};

function palette() {
  const chosen = document.documentElement.dataset.theme;
  const isDark = chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  return PALETTES[isDark ? "dark" : "light"];
}

// share is from -1 to 1, null for what is not there, or NaN for what is no number.
function mix(colors, share) {
  if (share === null) return colors.none;
  if (Number.isNaN(share)) return colors.bad;
  const strong = share < 0 ? colors.minus : colors.plus, size = Math.min(1, Math.abs(share)) ** 0.7;
  return colors.zero.map((zero, at) => Math.round(zero + (strong[at] - zero) * size));
}

// For values that are often powers of ten apart: a logarithmic share, from 0.12 for the lowest one, because 0 is for equal ones.
const FLOOR = 0.12;

export function logShare(low, high) {
  return (value) => (Number.isNaN(value) ? NaN : !(value > 0) ? 0 : !(high > low) ? 1 : FLOOR + ((1 - FLOOR) * Math.log(Math.min(value, high) / low)) / Math.log(high / low));
}

// spec: label, cells (rows of numbers, or null), share(value), describe(row, column), choose(row, column), rowNames, columnNames.
export function drawHeat(host, spec) {
  const tall = spec.cells.length, wide = spec.cells[0].length;
  const canvas = el("canvas", { width: wide, height: tall, class: "heat-map", role: "img", tabindex: "0", "aria-label": spec.label });
  const context = canvas.getContext("2d"), image = context.createImageData(wide, tall), colors = palette();
  spec.cells.forEach((line, row) => line.forEach((value, column) => {
    const color = mix(colors, value === null ? null : spec.share(value));
    image.data.set([...color, 255], 4 * (row * wide + column));
  }));
  context.putImageData(image, 0, 0);
  let place = [0, 0];
  const mark = el("i", { class: "heat-mark", hidden: true });
  const show = (row, column) => {
    place = [Math.max(0, Math.min(tall - 1, row)), Math.max(0, Math.min(wide - 1, column))];
    const box = canvas.getBoundingClientRect();
    Object.assign(mark.style, { left: (100 * place[1]) / wide + "%", top: (100 * place[0]) / tall + "%", width: 100 / wide + "%", height: 100 / tall + "%" });
    mark.hidden = false;
    showTip(box.left + ((place[1] + 0.5) * box.width) / wide, box.top + (place[0] * box.height) / tall, spec.describe(...place));
  };
  const hide = () => { mark.hidden = true; hideTip(); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    show(Math.floor((tall * (event.clientY - box.top)) / box.height), Math.floor((wide * (event.clientX - box.left)) / box.width));
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("click", () => spec.choose(...place));
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (event.key in moves) show(place[0] + moves[event.key][0], place[1] + moves[event.key][1]);
    else if (event.key === "Enter") spec.choose(...place);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
  const frame = el("div", { class: "heat-frame" }, canvas, mark);
  if (spec.rowNames) canvas.style.height = Math.max(14, Math.min(24, 480 / tall)) * tall + "px";
  else {
    frame.style.aspectRatio = String(Math.max(0.8, Math.min(3, wide / tall)));
    // A tensor of few values needs no large picture.
    frame.style.maxWidth = MOST_CELL * Math.max(wide, tall) + "px";
  }
  renew(host, spec.rowNames ? drawNamed(frame, canvas, spec, host.clientWidth || 800) : frame);
}

function drawNamed(frame, canvas, spec, width) {
  const names = el("div", { class: "heat-rows mono", "aria-hidden": "true" }, spec.rowNames.map((name) => el("span", { title: name }, el("bdi", {}, name))));
  names.style.height = canvas.style.height;
  // Names of columns must not overlap: about 7 pixels a character, and two thirds of the width for the map.
  const longest = spec.columnNames.reduce((most, name) => Math.max(most, name.length), 0);
  const cell = (0.62 * width) / spec.columnNames.length, gap = Math.max(1, Math.ceil((7 * longest + 8) / cell));
  const columns = el("div", { class: "heat-columns", "aria-hidden": "true" });
  for (let at = 0; at < spec.columnNames.length; at += gap) {
    const isLast = at === spec.columnNames.length - 1 && 7 * spec.columnNames[at].length > cell;
    const name = el("span", { class: isLast ? "end" : null }, spec.columnNames[at]);
    if (!isLast) name.style.left = (100 * (at + 0.5)) / spec.columnNames.length + "%";
    columns.append(name);
  }
  return el("div", { class: "heat-named" }, names, el("div", {}, frame, columns));
}

// The colour of one value, and what it means.
function drawSwatch(color, meaning) {
  const swatch = el("i", { class: "swatch" });
  swatch.style.backgroundColor = `rgb(${color.join(", ")})`;
  return el("span", { class: "scale-line muted" }, swatch, meaning);
}

// meanings: of the colours that are not on the scale: zero, none, bad.
export function drawMeanings(meanings) {
  const colors = palette();
  return Object.entries(meanings).map(([name, meaning]) => drawSwatch(colors[name], meaning));
}

export function drawLogScale(low, high) {
  return el("span", { class: "scale-line muted" }, drawScale(low, high, false, short, FLOOR), "(logarithmic)");
}

export function drawScale(low, high, isSigned, show = short, from = 0) {
  const colors = palette(), steps = 24;
  const canvas = el("canvas", { width: steps, height: 1, class: "scale", "aria-hidden": "true" });
  const context = canvas.getContext("2d"), image = context.createImageData(steps, 1);
  for (let at = 0; at < steps; at++) image.data.set([...mix(colors, isSigned ? (2 * at) / (steps - 1) - 1 : from + ((1 - from) * at) / (steps - 1)), 255], 4 * at);
  context.putImageData(image, 0, 0);
  return el("span", { class: "scale-line muted" }, show(low), canvas, show(high));
}

export function progress(done, total) {
  return el("progress", { max: String(total), value: String(done), "aria-label": `${count(done)} of ${count(total)}` });
}
