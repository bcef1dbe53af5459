// Histograms of one tensor, or of two on one axis. Shared by the report and by the page of `holdfast serve`.
import { clean, el, numeral, short, svg } from "./elements.js";

// Draws one or two sides on one axis, as densities, because their bins may differ. A side has low, high and histogram.
export function drawHistogram(host, sides, names, isLog) {
  // A host that is not in the document yet has no width.
  const width = Math.max(280, Math.min(720, Math.round(host.clientWidth) || 540)), height = 204, left = 8, bottom = height - 24, top = 22;
  const drawn = sides.map((side) => (side && side.histogram.length ? side : null));
  const ends = drawn.filter(Boolean).map((side) => [numeral(side.low), numeral(side.high)]);
  if (!ends.length) return;
  let low = Math.min(...ends.map((end) => end[0])), high = Math.max(...ends.map((end) => end[1]));
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const x = (value) => left + ((width - 2 * left) * (value - low)) / (high - low);
  const shapes = drawn.map((side) => side && densities(side, high - low));
  const most = Math.max(...shapes.filter(Boolean).flatMap((bins) => bins.map((bin) => bin[2])), 1e-300);
  const least = Math.min(...shapes.filter(Boolean).flatMap((bins) => bins.map((bin) => bin[2]).filter((size) => size > 0)));
  const rise = isLog ? (size) => (size > 0 ? (Math.log(size / least) + 0.7) / (Math.log(most / least) + 0.7) : 0) : (size) => size / most;
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
  picture.append(svg("text", { class: "axis-name", x: 0, y: 11 }, isLog ? "density, logarithmic" : "density"));
  const signs = ["\u25A0 ", "\u2014 "];
  const key = names.map((name, at) => (drawn[at] ? el("span", { class: at ? "side-b" : "side-a" }, signs[at] + clean(name)) : null));
  host.replaceChildren(picture, el("div", { class: "key" }, key));
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
