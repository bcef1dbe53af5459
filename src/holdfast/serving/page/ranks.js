// What each rank stored: a table of ranks for a snapshot, and for a tensor, a map and a table of its pieces.
import { ask } from "./api.js";
import { bytes } from "./charts.js";
import { hideTip, showTip } from "./cursor.js";
import { clean, count, el, svg } from "./elements.js";
import { showError } from "./errors.js";
import { Grid } from "./grid.js";
import { note } from "./router.js";

const MAP = { width: 420, height: 220 };
const MOST = 1000;

// Says in a few words how a leaf was cut, such as Shard(0).
export function shortCut(cut) {
  if (!cut) return "";
  if (cut.kind === "grid") return cut.grid.flatMap((parts, dim) => (parts > 1 ? [`Shard(${dim})`] : [])).join(", ");
  return { shares: "Replicate", "per rank": "one each", whole: "one rank", boxes: "boxes" }[cut.kind] || "";
}

function longCut({ kind, grid, ranks, world }) {
  if (kind === "whole") return "One rank stored all of it.";
  if (kind === "per rank") return `${count(ranks)} ranks have a value of their own.`;
  if (kind === "shares") return `It is the same on all ranks (Replicate): ${count(ranks)} of ${count(world)} stored a share of it.`;
  if (kind !== "grid") return `${count(ranks)} of ${count(world)} ranks stored boxes of it.`;
  const dims = grid.flatMap((parts, dim) => (parts > 1 ? [dim] : []));
  const mesh = dims.map((dim) => grid[dim]).join(" x ");
  if (!dims.length) return "It was stored in one piece.";
  return `Cut along ${dims.length > 1 ? "dims" : "dim"} ${dims.join(", ")} into ${mesh} pieces, as ${dims.map((dim) => `Shard(${dim})`).join(", ")} on a mesh of ${mesh} does.`;
}

export function drawRanks(found, parameters, signal) {
  const table = el("div");
  const card = el("section", { class: "card", "aria-labelledby": "ranks-title" }, el("h2", { id: "ranks-title" }, "Ranks"),
    el("p", { class: "muted help" }, "What each rank stored. Of values that are the same on several ranks, each of these stored a share."), table);
  const state = { most: 1 };
  const size = (name, title, tip) => ({ name, title, number: true, width: "minmax(80px, 110px)", sort: name, tip, show: (row) => bytes(row[name]) });
  const grid = new Grid(table, {
    label: "Ranks", sort: parameters.ranks || "rank",
    columns: [
      { name: "rank", title: "Rank", number: true, width: "64px", sort: "rank", show: (row) => count(row.rank) },
      { name: "entries", title: "Entries", number: true, width: "84px", sort: "entries", tip: "tensors and long values of which it stored a part", show: (row) => count(row.entries) },
      size("size_bytes", "Size", "bytes of the values that it stored"),
      size("new_bytes", "New", "bytes that the store did not have before"),
      { ...size("stored_bytes", "Stored", "its chunks in packs, and its manifest"), wide: true },
      { name: "share", title: "", tip: "Bytes, and the part of them that was new", wide: true, width: "minmax(80px, 1fr)", show: (row) => bar(row, state.most) },
    ],
    read: async (offset, limit, sort) => {
      const page = await ask("ranks", { name: found.name, sort, offset, limit }, signal);
      state.most = Math.max(1, page.most_bytes);
      return { total: page.total, rows: page.ranks };
    },
    open: () => {}, onSort: (sort) => note({ ranks: sort }), empty: "No rank stored a part.",
  });
  grid.reload(true);
  return { card, grid };
}

// A bar as long as the size of a rank's part; the new bytes are darker.
function bar(row, most) {
  const whole = el("i", { class: "part-bar" }), fresh = el("i", { class: "part-new" });
  whole.style.width = (100 * row.size_bytes) / most + "%";
  fresh.style.width = row.size_bytes ? (100 * row.new_bytes) / row.size_bytes + "%" : "0";
  whole.append(fresh);
  return [whole];
}

// Shows the pieces of a tensor; `look` gets the index of the piece that was chosen. Nothing if one process saved it.
export async function drawPieces(host, { name, leaf }, look, signal) {
  let found;
  try {
    found = await ask("pieces", { name, leaf, limit: MOST }, signal);
  } catch (error) {
    if (error.name !== "AbortError" && error.kind !== "NotFound") showError(host, error);
    return null;
  }
  if (!found.world) return null;
  const table = el("div"), map = el("div", { id: "piece-map", class: "plot" });
  host.append(el("section", { class: "card", "aria-labelledby": "pieces-title" }, el("h2", { id: "pieces-title" }, "Pieces"),
    el("p", { id: "cut" }, longCut(found)),
    el("p", { class: "muted help" }, "Derived from the boxes in the manifests, which contain neither meshes nor placements. Enter, or a click, shows the values of a piece."),
    el("div", { class: "slice" }, map, table)));
  drawMap(map, found);
  const grid = new Grid(table, {
    label: "Pieces", columns: columns(found),
    read: async (offset, limit) => {
      if (offset + limit <= found.pieces.length || found.pieces.length === found.total) return { total: found.total, rows: found.pieces.slice(offset, offset + limit) };
      const page = await ask("pieces", { name, leaf, offset, limit }, signal);
      return { total: page.total, rows: page.pieces };
    },
    open: (piece) => piece.shape && look(piece.offsets.map((start, dim) => `${start}:${start + piece.shape[dim]}`).join(", ")),
    empty: "No rank stored a piece of it.",
  });
  grid.reload(true);
  return grid;
}

function columns(found) {
  const tuple = (list) => (list ? `(${list.join(", ")})` : "");
  return [
    { name: "rank", title: "Rank", number: true, width: "52px", show: (piece) => count(piece.rank) },
    ...(found.pieces.some((piece) => piece.part) ? [{ name: "part", title: "Part", width: "90px", show: (piece) => clean(piece.part) }] : []),
    { name: "offsets", title: "Starts at", main: true, width: "minmax(90px, 1fr)", show: (piece) => (piece.offsets ? tuple(piece.offsets) : `item ${count(piece.span[0])}`) },
    { name: "shape", title: "Shape", width: "minmax(76px, 1fr)", show: (piece) => (piece.shape ? tuple(piece.shape) : `${count(piece.span[1] - piece.span[0])} items`) },
    { name: "bytes", title: "Size", number: true, width: "74px", show: (piece) => bytes(piece.bytes) },
    { name: "new", title: "New", number: true, width: "80px", wide: 440, tip: "bytes that this save wrote; the others were in the store before", show: (piece) => bytes(piece.new_bytes) },
  ];
}

// Draws the boxes over the two dims along which the tensor is cut; spans of items, and vectors, as a strip.
function drawMap(host, found) {
  const shape = found.shape, pieces = found.kind === "per rank" ? [] : found.pieces;
  if (!shape || !pieces.length) {
    host.remove();
    return;
  }
  const isFlat = shape.length < 2 || pieces.some((piece) => !piece.shape);
  const items = shape.reduce((total, size) => total * size, 1) || 1;
  const [down, across] = isFlat ? [null, null] : chooseDims(shape, pieces);
  const place = (piece) => {
    if (isFlat) {
      const [start, stop] = piece.span || span(piece, shape);
      return { x: start / items, width: (stop - start) / items, y: 0, height: 1 };
    }
    return { x: piece.offsets[across] / shape[across], width: piece.shape[across] / shape[across], y: piece.offsets[down] / shape[down], height: piece.shape[down] / shape[down] };
  };
  const height = isFlat ? 48 : MAP.height;
  const picture = svg("svg", { viewBox: `0 0 ${MAP.width} ${height}`, role: "img", "aria-label": `Which rank stored which part: ${longCut(found)} The table has the numbers.` });
  pieces.forEach((piece, at) => {
    const box = place(piece), x = box.x * MAP.width, y = box.y * height, wide = box.width * MAP.width, tall = box.height * height;
    picture.append(svg("rect", { class: "piece q-" + (piece.rank % 6), "data-at": String(at), x: x + 0.5, y: y + 0.5, width: Math.max(0.5, wide - 1), height: Math.max(0.5, tall - 1) }));
    if (wide > 18 && tall > 14) picture.append(svg("text", { class: "piece-rank", x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, String(piece.rank)));
  });
  picture.addEventListener("pointermove", (event) => {
    const piece = pieces[Number(event.target.dataset && event.target.dataset.at)];
    if (!piece) return hideTip();
    const where = piece.shape ? `starts at (${piece.offsets.join(", ")}), shape (${piece.shape.join(", ")})` : `items ${count(piece.span[0])} to ${count(piece.span[1])}`;
    return showTip(event.clientX, event.clientY, [`rank ${piece.rank}`, where, `${bytes(piece.bytes)}, ${bytes(piece.new_bytes)} of it new`]);
  });
  picture.addEventListener("pointerleave", hideTip);
  const axes = isFlat ? "items in order" : `down: dim ${down}, across: dim ${across}`;
  const rest = found.total > pieces.length ? `; the first ${count(pieces.length)} of ${count(found.total)} pieces` : "";
  host.append(picture, el("p", { class: "muted help" }, `Numbers are ranks; ${axes}${rest}.`));
}

function span(piece, shape) {
  const row = shape.slice(1).reduce((total, size) => total * size, 1), start = (piece.offsets[0] || 0) * row;
  return [start, start + piece.shape.reduce((total, size) => total * size, 1)];
}

function chooseDims(shape, pieces) {
  const dims = shape.map((_, dim) => dim);
  const cut = dims.filter((dim) => new Set(pieces.map((piece) => piece.offsets[dim])).size > 1);
  const others = dims.filter((dim) => !cut.includes(dim));
  const chosen = [...cut, ...others].slice(0, 2).sort((p, q) => p - q);
  return chosen;
}
