// Decodes the data of the page: columns by name, and texts by number. Names are always text, never markup.
const CLASSES = ["ORIGIN", "PROPAGATED", "CLOSE", "MISSING", "EQUAL"];
const ROLE = new Set(CLASSES);
const MEANING = {
  ORIGIN: "differs, its inputs do not",
  PROPAGATED: "differs because its inputs do",
  CLOSE: "within the tolerance",
  MISSING: "in one run only",
  EQUAL: "the same bytes",
};
const NUMBERS = ["rel", "abs", "cos", "sqnr", "ulp", "mismatch"];
const TEXTS = ["phase", "kind", "fqn", "path", "verdict", "dtype", "shape", "module", "source", "pairing", "note", "bad"];
const COUNTS = ["step", "rank", "call"];

const data = JSON.parse(document.getElementById("data").textContent);
const rows = decode(data);

function decode(raw) {
  const columns = { size: raw.columns.step.length };
  for (const name of COUNTS) columns[name] = Int32Array.from(raw.columns[name]);
  for (const name of NUMBERS) columns[name] = Float64Array.from(raw.columns[name], (x) => (x === null ? NaN : Number(x)));
  for (const name of TEXTS) columns[name] = Uint32Array.from(raw.columns[name]);
  columns.text = raw.strings.map(clean);
  columns.lower = columns.text.map((text) => text.toLowerCase());
  return columns;
}

// Invisible characters, and those that change the text direction, are shown as escapes.
function clean(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function text(column, row) {
  return rows.text[rows[column][row]];
}

function fullName(row) {
  return (text("fqn", row) || "(the model)") + text("path", row) + (rows.call[row] ? " #" + rows.call[row] : "");
}

function className(verdict) {
  return ROLE.has(verdict) ? "c-" + verdict.toLowerCase() : "c-other";
}

function isDifferent(row) {
  const verdict = text("verdict", row);
  return verdict !== "EQUAL" && verdict !== "CLOSE";
}

function count(number) {
  return Number(number).toLocaleString("en");
}

function short(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e5 || size < 1e-2) return number.toExponential(2).replace("e+", "e");
  return Number.isInteger(number) ? count(number) : String(Number(number.toPrecision(4)));
}

// Beyond this, units in the last place mean nothing: small values of opposite sign are billions of units apart.
function ulps(number) {
  return number > 1000 ? "> 1000" : short(number);
}

// With enough digits to show a difference between two runs.
function exact(number) {
  return Number.isFinite(number) ? String(Number(number.toPrecision(8))) : short(number);
}

function numeral(value) {
  return value === null || value === undefined ? NaN : Number(value);
}

// el("p", {class: "muted"}, "text", child): attributes are set one by one, texts become text nodes.
function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

function pill(verdict) {
  return el("span", { class: "pill " + className(verdict) }, verdict);
}
