// What all plots have in common: the point under the pointer or the keys, its tip, and the key of the lines. Shared by the report and by the page of `holdfast serve`.
import { byId, el, fill, svg } from "./elements.js";

const SHOWN_SERIES = 12;

// points: [{left, top, ...}] in units of the picture; spec: describe(point), choose(point).
// The nearest point follows the pointer or the arrow keys; a click or Enter chooses it.
export function addCursor(picture, points, spec) {
  if (!points.length) return;
  points.sort((p, q) => p.left - q.left || p.top - q.top);
  const dot = svg("circle", { class: "cursor-dot", r: 5, visibility: "hidden" });
  picture.append(dot);
  let at = -1;
  const show = (next) => {
    at = next;
    const point = points[at];
    fill(dot, { cx: point.left, cy: point.top, visibility: "visible" }, []);
    const box = picture.getBoundingClientRect();
    const ratio = box.width / picture.viewBox.baseVal.width;
    showTip(box.left + point.left * ratio, box.top + point.top * ratio, spec.describe(point));
  };
  const hide = () => { dot.setAttribute("visibility", "hidden"); hideTip(); };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const ratio = picture.viewBox.baseVal.width / box.width;
    show(nearest(points, (event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("click", () => at >= 0 && spec.choose(points[at]));
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key in moves) show(Math.max(0, Math.min(points.length - 1, at + moves[event.key])));
    else if (event.key === "Enter" && at >= 0) spec.choose(points[at]);
    else if (event.key === "Escape" && !byId("tip").hidden) hide();
    else return;
    event.preventDefault();
  });
}

function nearest(points, left, top) {
  let best = 0, least = Infinity;
  points.forEach((point, at) => {
    const apart = (point.left - left) ** 2 * 4 + (point.top - top) ** 2;
    if (apart < least) [best, least] = [at, apart];
  });
  return best;
}

export function showTip(left, top, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
  tip.hidden = false;
  tip.style.left = Math.max(8, Math.min(left + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, top - tip.offsetHeight - 12) + "px";
}

export function hideTip() {
  byId("tip").hidden = true;
}

// series: [{name, css, isLine, points}]; those without points are left out.
export function drawKey(series) {
  const used = series.filter((each) => each.points.length), key = el("div", { class: "key" });
  for (const one of used.slice(0, SHOWN_SERIES)) {
    const sample = svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
    sample.append(svg("path", { class: (one.isLine ? "line " : "dots ") + one.css, d: one.isLine ? "M1 5H21" : "M11 5h0" }));
    key.append(el("span", {}, sample, one.name));
  }
  if (used.length > SHOWN_SERIES) key.append(el("span", {}, `and ${used.length - SHOWN_SERIES} more`));
  return key;
}
