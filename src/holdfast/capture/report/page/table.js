// The table of tensors: filters and sorts indices, and keeps only the visible rows in the document.
const COLUMNS = [
  { name: "verdict", title: "Class", width: "130px", show: (row) => pill(text("verdict", row)), tip: "ORIGIN: differs, its inputs do not. PROPAGATED: differs because its inputs do. CLOSE: within the tolerance. MISSING: in one run only. EQUAL: the same bytes." },
  { name: "step", title: "Step", width: "54px", number: true, show: (row) => String(rows.step[row]) },
  { name: "rank", title: "Rank", width: "54px", number: true, show: (row) => String(rows.rank[row]) },
  { name: "phase", title: "Phase", width: "86px", show: (row) => text("phase", row) },
  { name: "kind", title: "Kind", width: "92px", show: (row) => text("kind", row) },
  { name: "fqn", title: "Name", width: "minmax(180px, 2fr)", show: fullName, main: true },
  { name: "rel", title: "Rel. L2", width: "78px", number: true, show: (row) => [short(rows.rel[row]), drawHeat(rows.rel[row])], tip: "|a - b| / |a|; the bar below it is logarithmic, from 1e-8 to 1" },
  { name: "abs", title: "Max |d|", width: "78px", number: true, show: (row) => short(rows.abs[row]), tip: "the largest difference of two values" },
  { name: "cos", title: "Cosine", width: "84px", number: true, show: (row) => cosine(rows.cos[row]), tip: "cosine similarity of the two tensors" },
  { name: "ulp", title: "ULP", width: "78px", number: true, show: (row) => ulps(rows.ulp[row]), tip: "the largest difference in units in the last place; > 1000 is more than rounding" },
  { name: "mismatch", title: "Over tol.", width: "76px", number: true, show: (row) => percent(rows.mismatch[row]), tip: "share of values outside the tolerance" },
  { name: "bad", title: "NaN/Inf", width: "76px", show: (row) => text("bad", row), tip: "how many, in the first run and in the second" },
  { name: "dtype", title: "Tensor", width: "minmax(170px, 1fr)", show: (row) => text("dtype", row) + " " + text("shape", row) },
  { name: "source", title: "Source", width: "minmax(110px, .6fr)", show: (row) => text("source", row) },
];
const SEARCHED = ["fqn", "path", "module", "dtype", "source", "kind", "phase", "note", "verdict"];
const CHOICES = [["verdict", "class"], ["step", "step"], ["rank", "rank"], ["phase", "phase"], ["kind", "kind"]];

for (const column of COLUMNS) column.sort = column.name;

const table = { order: new Uint32Array(0), picked: {}, words: [], key: "", down: false, orders: new Map(), lines: null };

function percent(value) {
  if (Number.isNaN(value)) return "";
  return (value > 0 && value < 0.01 ? "<0.01" : String(Number(value.toFixed(2)))) + " %";
}

// Near 1, show the distance from 1.
function cosine(value) {
  if (Number.isNaN(value)) return "";
  const apart = 1 - value;
  return apart !== 0 && Math.abs(apart) < 1e-4 ? "1 - " + apart.toExponential(1) : String(Number(value.toFixed(5)));
}

function startTable() {
  const isOneRank = rows.rank.every((rank) => rank === rows.rank[0]);
  const isEmpty = (name) => rows[name].every((value) => rows.text[value] === "");
  const unused = new Set([isOneRank ? "rank" : "", isEmpty("bad") ? "bad" : "", isEmpty("source") ? "source" : ""]);
  const columns = COLUMNS.filter((column) => !unused.has(column.name));
  // A narrow page shows the first columns: the name has to be one of them.
  if (window.innerWidth <= 600) columns.sort((p, q) => isEarly(q) - isEarly(p));
  table.lines = new LongTable(byId("grid"), {
    empty: "No tensor matches. Clear the filters to see all.", draw: () => table.lines.draw(), row: (at) => table.order[at],
    id: (at) => "row-" + table.order[at], open: openDetail, toggle: openDetail, follows: () => !byId("detail").hidden,
    mark: (node, row) => node.classList.toggle("is-origin", text("verdict", row) === "ORIGIN"),
  });
  table.lines.setColumns(columns, columns.map((column) => (column.main ? fitNames() : column.width)).join(" "), () => "none", (column) => sortBy(column.name));
  new ResizeObserver(() => table.lines.draw()).observe(byId("grid"));
  byId("words").addEventListener("input", (event) => {
    table.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    refilter();
  });
  byId("clear").addEventListener("click", clearFilters);
  for (const [name, title] of CHOICES) addChoice(name, title, isOneRank);
  refilter();
  if (data.origin >= 0) showFirst(data.origin);
}

function isEarly(column) {
  return column.name === "verdict" || column.name === "fqn" ? 1 : 0;
}

// The column of names is as wide as the longest one, within reason: a name that is cut says little.
function fitNames() {
  let longest = 0;
  for (let row = 0; row < rows.size; row++) longest = Math.max(longest, fullName(row).length);
  return `minmax(${Math.max(180, Math.min(520, Math.ceil(7.6 * longest) + 24))}px, 2fr)`;
}

// Scroll to the origin, with a few rows before it.
function showFirst(row) {
  table.lines.active = row;
  table.lines.scrollTo(Math.max(0, row - 4));
  table.lines.draw();
}

function addChoice(name, title, isOneRank) {
  if (name === "rank" && isOneRank) return;
  const isText = rows[name] instanceof Uint32Array;
  const values = [...new Set(rows[name])];
  if (!isText) values.sort((x, y) => x - y);
  const select = el("select", { id: "choose-" + name, "aria-label": "Only this " + title }, el("option", { value: "" }, "Any " + title));
  for (const value of values) select.append(el("option", { value: String(value) }, isText ? rows.text[value] : title + " " + value));
  if (name === "verdict") select.append(el("option", { value: "differs" }, "All that differ"));
  select.addEventListener("change", () => pick(name, select.value));
  byId("choices").append(select);
}

function pick(name, value) {
  if (value === "") delete table.picked[name];
  else table.picked[name] = value === "differs" ? value : Number(value);
  refilter();
}

// Toggles the filter for a class; the tiles above call it with the class name.
function pickVerdict(verdict) {
  const at = rows.text.indexOf(verdict);
  const isOn = table.picked.verdict === at;
  pick("verdict", isOn || at < 0 ? "" : String(at));
}

function clearFilters() {
  table.picked = {};
  table.words = [];
  byId("words").value = "";
  refilter();
}

// Searches each word once in every distinct text; a row then only reads whether its texts match.
function findWords() {
  return table.words.map((word) => Uint8Array.from(rows.lower, (text) => (text.includes(word) ? 1 : 0)));
}

function fits(row, found) {
  for (const hits of found) {
    let hit = false;
    for (const name of SEARCHED) if (hits[rows[name][row]]) { hit = true; break; }
    if (!hit) return false;
  }
  for (const name in table.picked) {
    const wanted = table.picked[name];
    if (wanted === "differs" ? !isDifferent(row) : rows[name][row] !== wanted) return false;
  }
  return true;
}

function refilter() {
  const found = findWords();
  const kept = [];
  for (let row = 0; row < rows.size; row++) if (fits(row, found)) kept.push(row);
  table.order = Uint32Array.from(kept);
  table.lines.active = 0;
  resort();
  for (const [name] of CHOICES) {
    const select = byId("choose-" + name);
    if (!select) continue;
    select.value = name in table.picked ? String(table.picked[name]) : "";
    select.classList.toggle("set", name in table.picked);
  }
  byId("clear").disabled = !table.words.length && !Object.keys(table.picked).length;
  byId("shown").textContent = table.order.length === rows.size ? count(rows.size) + " tensors" : count(table.order.length) + " of " + count(rows.size);
  document.dispatchEvent(new CustomEvent("filtered"));
}

function sortBy(name) {
  const isMeasure = NUMBERS.includes(name);
  if (table.key !== name) [table.key, table.down] = [name, isMeasure];
  else if (table.down === isMeasure) table.down = !table.down;
  else table.key = "";
  resort();
}

// All rows are sorted once per column; filtered rows are then picked in that order.
function resort() {
  const kept = new Uint8Array(rows.size);
  for (const row of table.order) kept[row] = 1;
  let at = 0;
  for (const row of findOrder(table.key, table.down)) if (kept[row]) table.order[at++] = row;
  for (const cell of table.lines.head.children) {
    const isKey = cell.dataset.key === table.key;
    cell.setAttribute("aria-sort", isKey ? (table.down ? "descending" : "ascending") : "none");
  }
  table.lines.setSize(table.order.length);
  table.lines.empty.hidden = table.order.length > 0;
  table.lines.scrollTo(0);
  table.lines.draw();
}

function findOrder(name, down) {
  const key = name + (down ? " down" : "");
  if (!table.orders.has(key)) table.orders.set(key, sortAll(name, down));
  return table.orders.get(key);
}

// Counting sort: stable, so rows with equal values stay in the order of the run.
// Unknown values come last in both directions.
function sortAll(name, down) {
  const rank = name ? rankOf(name) : Float64Array.from({ length: rows.size }, (_, row) => row);
  const values = Float64Array.from(new Set(rank)).sort();
  const known = values.filter((value) => !Number.isNaN(value));
  if (down) known.reverse();
  const place = new Map([...known, NaN].map((value, at) => [value, at]));
  const places = Uint32Array.from(rank, (value) => place.get(value));
  const starts = new Uint32Array(place.size + 1);
  for (const at of places) starts[at + 1]++;
  for (let at = 0; at < place.size; at++) starts[at + 1] += starts[at];
  const order = new Uint32Array(rows.size);
  places.forEach((at, row) => { order[starts[at]++] = row; });
  return order;
}

function rankOf(name) {
  if (!(rows[name] instanceof Uint32Array)) return Float64Array.from(rows[name]);
  const used = [...new Set(rows[name])];
  const collator = new Intl.Collator("en", { numeric: true });
  if (name === "verdict") used.sort((x, y) => CLASSES.indexOf(rows.text[x]) - CLASSES.indexOf(rows.text[y]));
  else used.sort((x, y) => collator.compare(rows.text[x], rows.text[y]));
  const place = new Map(used.map((text, at) => [text, at]));
  return Float64Array.from(rows[name], (text) => place.get(text));
}

// A bar, logarithmic from 1e-8 (noise) to 1 (unrelated tensors).
function drawHeat(value) {
  const bar = el("i", { class: "heat" });
  bar.style.width = (value > 0 ? Math.round(80 * Math.min(1, Math.max(0.04, (Math.log10(value) + 8) / 8))) : 0) + "px";
  return bar;
}
