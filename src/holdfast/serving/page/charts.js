// Charts as SVG and canvas: lines over steps or times, sparklines, and heat maps. Each has a tip, and works with keys.
import { addCursor, drawKey, hideTip, showTip } from "./cursor.js";
import { count, el, short, svg } from "./elements.js";

const HEIGHT = 240, EDGE = { left: 64, right: 16, top: 14, bottom: 42 };

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

export function niceTicks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / most));
  const gap = [1, 2, 5, 10].find((factor) => (factor * power * most) >= span) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / gap); tick * gap <= high + gap * 1e-9; tick++) ticks.push(Number((tick * gap).toPrecision(12)));
  return ticks;
}

// spec: label, xName, yName, series [{name, points: [{x, y, ...}]}], showX(x), showY(y), describe(point), choose(point).
export function drawLines(host, spec) {
  const width = Math.max(300, Math.round(host.clientWidth));
  const points = spec.series.flatMap((one, at) => one.points.map((point) => ({ ...point, at })));
  if (!points.length) {
    host.replaceChildren(el("p", { class: "muted" }, "No snapshot here has this number."));
    return;
  }
  const scale = makeScale(points.map((point) => point.x), EDGE.left, width - EDGE.right), { x } = scale;
  let [y0, y1] = ends(points.map((point) => point.y));
  const pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 0.5;
  [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - pad) : y0 - pad, y1 + pad];
  const y = (value) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * (value - y0)) / (y1 - y0);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": spec.label });
  for (const tick of niceTicks(y0, y1, 6)) {
    picture.append(svg("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }));
    picture.append(svg("text", { x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, spec.showY(tick)));
  }
  drawSteps(picture, { ...spec, scale, left: EDGE.left, right: width - EDGE.right, bottom: HEIGHT - EDGE.bottom, height: HEIGHT });
  const series = spec.series.map((one, at) => ({ ...one, css: "p-" + (at % 6), isLine: true }));
  for (const one of series) {
    const path = thin(one.points.map((point) => [x(point.x), y(point.y)]), width);
    if (path.length > 1) picture.append(svg("path", { class: "line " + one.css, d: "M" + path.map((p) => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L") }));
    if (path.length < 120) picture.append(svg("path", { class: "dots " + one.css, d: path.map((p) => `M${p[0].toFixed(1)} ${p[1].toFixed(1)}h0`).join("") }));
  }
  addCursor(picture, points.map((point) => ({ ...point, left: x(point.x), top: y(point.y) })), spec);
  host.replaceChildren(picture, series.length > 1 ? drawKey(series) : "");
}

// Returns the ends of some values, and where each is between two places.
export function makeScale(values, left, right) {
  let [low, high] = ends(values);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  return { low, high, x: (value) => left + ((right - left) * (value - low)) / (high - low) };
}

// Draws the axis of steps or times. spec: scale, left, right, bottom, height, xName, xWidth, showX(x).
export function drawSteps(picture, spec) {
  const { scale, left, right, bottom } = spec;
  picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const tick of niceTicks(scale.low, scale.high, Math.max(2, Math.floor((right + EDGE.right) / (spec.xWidth || 90))))) {
    picture.append(svg("text", { x: scale.x(tick), y: bottom + 16, "text-anchor": "middle" }, spec.showX(tick)));
  }
  picture.append(svg("text", { x: right, y: spec.height - 8, "text-anchor": "end" }, spec.xName));
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

// Colours: from the one of the page's background to a strong one, for both signs.
const PALETTES = {
  light: { zero: [246, 246, 244], plus: [178, 60, 10], minus: [30, 70, 190], none: [200, 200, 205] },
  dark: { zero: [34, 36, 42], plus: [255, 150, 80], minus: [120, 165, 255], none: [80, 82, 90] },
};

function palette() {
  const chosen = document.documentElement.dataset.theme;
  const isDark = chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  return PALETTES[isDark ? "dark" : "light"];
}

// share is from -1 to 1, or null.
function mix(colors, share) {
  if (share === null) return colors.none;
  const strong = share < 0 ? colors.minus : colors.plus, size = Math.min(1, Math.abs(share)) ** 0.7;
  return colors.zero.map((zero, at) => Math.round(zero + (strong[at] - zero) * size));
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
    else return;
    event.preventDefault();
  });
  const frame = el("div", { class: "heat-frame" }, canvas, mark);
  if (spec.rowNames) canvas.style.height = Math.max(14, Math.min(24, 480 / tall)) * tall + "px";
  else frame.style.aspectRatio = String(Math.max(0.8, Math.min(3, wide / tall)));
  host.replaceChildren(spec.rowNames ? drawNamed(frame, canvas, spec, host.clientWidth || 800) : frame);
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

export function drawScale(low, high, isSigned, show = short) {
  const colors = palette(), steps = 24;
  const canvas = el("canvas", { width: steps, height: 1, class: "scale", "aria-hidden": "true" });
  const context = canvas.getContext("2d"), image = context.createImageData(steps, 1);
  for (let at = 0; at < steps; at++) image.data.set([...mix(colors, isSigned ? (2 * at) / (steps - 1) - 1 : at / (steps - 1)), 255], 4 * at);
  context.putImageData(image, 0, 0);
  return el("span", { class: "scale-line muted" }, show(low), canvas, show(high));
}

export function progress(done, total) {
  return el("progress", { max: String(total), value: String(done), "aria-label": `${count(done)} of ${count(total)}` });
}
