// The lineage of runs: a lane for each series of snapshots, and a line from each snapshot that was loaded to the one that was saved next.
import { drawSteps, renew, scaleSteps } from "./charts.js";
import { addCursor } from "./cursor.js";
import { clean, count, el, svg } from "./elements.js";
import { address, go, note } from "./router.js";

const LANE = 36, TOP = 26, BOTTOM = 42, SIDE = 16, MAX_LANES = 24, MAX_OPEN = 8, MAX_LISTED = 10, MAX_DOTS = 120;

// Snapshots whose names are equal up to the last slash are a series.
export function seriesOf(name) {
  return name.slice(0, name.lastIndexOf("/") + 1) || name;
}

// found: the answer `series` of the API. Returns the lanes of the series that were loaded from or into, and the links between snapshots.
export function findLineage(found) {
  const places = new Map(found.names.map((name, at) => [name, at]));
  const links = found.loads.map(([at, from]) => ({ at, from, fromAt: places.get(from) ?? -1, isOwn: seriesOf(from) === seriesOf(found.names[at]) }));
  const members = new Map(), parents = new Map(), children = new Map();
  for (const link of links) {
    const series = seriesOf(found.names[link.at]), source = seriesOf(link.from);
    for (const each of link.fromAt < 0 ? [series] : [source, series]) members.set(each, []);
    if (link.isOwn || link.fromAt < 0 || parents.has(series)) continue;
    parents.set(series, source);
    children.set(source, [...(children.get(source) || []), series]);
  }
  found.names.forEach((name, at) => members.get(seriesOf(name))?.push(at));
  // Each series comes after the one that it continues. Those that continue each other have no first one, so they come last.
  const order = new Set(), waiting = [...[...members.keys()].filter((series) => !parents.has(series)), ...members.keys()].reverse();
  while (waiting.length) {
    const series = waiting.pop();
    if (order.has(series)) continue;
    order.add(series);
    waiting.push(...(children.get(series) || []).reverse());
  }
  const lanes = [...order].slice(0, MAX_LANES).map((name) => ({ name, members: members.get(name) }));
  return { links, lanes, more: order.size - lanes.length };
}

// spec: found, byTime, styles: the class of each line of the plot above, by series; state: "open", "closed" or nothing; and what `drawSteps` takes. Shows nothing if no snapshot was saved after a load.
export function drawLineage(host, spec) {
  const { found } = spec, lineage = findLineage(found);
  host.hidden = !lineage.links.length;
  if (host.hidden) return;
  const crossed = lineage.links.filter((link) => !link.isOwn).length, resumed = lineage.links.length - crossed;
  const counts = [crossed ? `${count(crossed)} ${crossed === 1 ? "run continues" : "runs continue"} another one` : "", resumed ? `${count(resumed)} ${resumed === 1 ? "was" : "were"} resumed` : ""].filter(Boolean).join("; ");
  // Made once, so that a new snapshot neither opens a card that was closed nor takes the focus from the picture.
  if (!host.firstChild) {
    const details = el("details", { open: spec.state ? spec.state === "open" : lineage.lanes.length <= MAX_OPEN });
    details.append(el("summary", { onclick: () => note({ lineage: details.open ? "closed" : "open" }) }), el("div", { class: "plot" }), el("div"));
    host.append(details);
  }
  const [summary, plot, list] = host.firstChild.children;
  summary.replaceChildren(el("h2", { id: "lineage-title", class: "inline" }, "Lineage"), " ", el("span", { class: "muted" }, counts));
  list.replaceChildren(drawList(found, lineage.links), lineage.more ? el("p", { class: "muted" }, `${count(lineage.more)} more series are not drawn: filter the snapshots to see them.`) : "");
  drawLanes(plot, spec, lineage, Math.max(300, Math.round(host.clientWidth - 32)));
}

function drawLanes(plot, spec, lineage, width) {
  const { found } = spec, xs = spec.byTime ? found.time_s : found.step;
  const lanes = lineage.lanes.map((lane) => ({ ...lane, members: lane.members.filter((at) => xs[at] !== null).sort((p, q) => xs[p] - xs[q]) })).filter((lane) => lane.members.length);
  if (!lanes.length) return plot.replaceChildren();
  const scale = scaleSteps(lanes.flatMap((lane) => lane.members.map((at) => xs[at])), SIDE, width - SIDE);
  const height = TOP + LANE * (lanes.length - 1) + 20 + BOTTOM;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `Lineage of ${count(lanes.length)} series; the list below says the same` });
  const tops = new Map(lanes.map((lane, row) => [lane.name, TOP + LANE * row]));
  const place = (at) => [scale.x(xs[at]), tops.get(seriesOf(found.names[at]))];
  for (const { at, fromAt, isOwn } of lineage.links) {
    if (isOwn || fromAt < 0 || [at, fromAt].some((each) => xs[each] === null || place(each)[1] === undefined)) continue;
    const [x0, y0] = place(fromAt), [x1, y1] = place(at), bend = Math.max(18, Math.abs(x1 - x0) / 2), tip = y1 - 5 * Math.sign(y1 - y0);
    picture.append(svg("path", { class: "link", d: `M${x0} ${y0}C${x0 + bend} ${y0} ${x1} ${tip - 0.6 * (y1 - y0)} ${x1} ${tip}` }), svg("path", { class: "link-end", d: `M${x1 - 4} ${tip - 5 * Math.sign(y1 - y0)}L${x1} ${tip}L${x1 + 4} ${tip - 5 * Math.sign(y1 - y0)}` }));
  }
  lanes.forEach((lane) => {
    const y = tops.get(lane.name), [first, last] = [scale.x(xs[lane.members[0]]), scale.x(xs[lane.members.at(-1)])], css = spec.styles.get(lane.name) || "p-none";
    picture.append(svg("path", { class: "line " + css, d: `M${first} ${y}H${last}` }));
    if (lane.members.length < MAX_DOTS) picture.append(svg("path", { class: "dots " + css, d: lane.members.map((at) => `M${scale.x(xs[at]).toFixed(1)} ${y}h0`).join("") }));
    const isLate = first > width - 220, isEntered = lineage.links.some((link) => !link.isOwn && seriesOf(found.names[link.at]) === lane.name);
    picture.append(svg("text", { class: "lane-name", x: isLate ? width - SIDE : first + (isEntered ? 10 : 0), y: y - 9, "text-anchor": isLate ? "end" : "start" }, clean(lane.name)));
  });
  for (const { at, isOwn } of lineage.links) if (isOwn && xs[at] !== null && place(at)[1] !== undefined) picture.append(svg("path", { class: "resumed", d: `M${place(at)[0]} ${place(at)[1] - 7}v14` }));
  drawSteps(picture, scale, height - BOTTOM, spec);
  const sources = new Map(), followers = new Map();
  for (const { at, from, fromAt } of lineage.links) {
    sources.set(at, [...(sources.get(at) || []), from]);
    followers.set(fromAt, [...(followers.get(fromAt) || []), found.names[at]]);
  }
  const list = (what, names) => (names ? [what + names.slice(0, 4).map(clean).join(", ") + (names.length > 4 ? ", \u2026" : "")] : []);
  const points = lanes.flatMap((lane) => lane.members.map((at) => ({ at, left: place(at)[0], top: place(at)[1] })));
  addCursor(picture, points, {
    describe: ({ at }) => [clean(found.names[at]), (spec.byTime ? "" : "step ") + spec.showX(xs[at]), ...list("after loading ", sources.get(at)), ...list("loaded before ", followers.get(at))],
    choose: ({ at }) => go("snapshot", { name: found.names[at] }),
  });
  renew(plot, picture);
}

// The newest links as sentences, for those who do not see the picture, and to follow.
function drawList(found, links) {
  const to = (name, isKnown) => (isKnown ? el("a", { href: address("snapshot", { name }) }, clean(name)) : el("span", {}, el("code", {}, clean(name)), " (not in this list)"));
  const lines = links.slice(-MAX_LISTED).reverse().map(({ at, from, fromAt, isOwn }) => el("li", {}, to(found.names[at], true), isOwn ? " resumed from " : " continues ", to(from, fromAt >= 0)));
  if (links.length > MAX_LISTED) lines.push(el("li", { class: "muted" }, `and ${count(links.length - MAX_LISTED)} more`));
  return el("ul", { class: "links", id: "links" }, lines);
}
